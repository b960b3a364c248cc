"""What is found in a program: attention, blocks, dimensions, axes, names."""
