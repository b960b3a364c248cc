"""What is found in a program: attention, layers, streams, dimensions, axes, names."""
