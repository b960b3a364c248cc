"""How people see it; computes nothing."""
