"""What the paper leaves open: long skips, growth, compiled plans, other architectures."""
