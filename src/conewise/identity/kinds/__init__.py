"""What values are, kind by kind: each function is given a walk, and asks it for what a value holds."""
