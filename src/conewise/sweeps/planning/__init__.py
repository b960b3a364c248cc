"""Plans of sweeps: the steps to compute, and their cost."""
