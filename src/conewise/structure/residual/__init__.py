"""The residual stream: its branches, its layers, and names for what lies along it."""
