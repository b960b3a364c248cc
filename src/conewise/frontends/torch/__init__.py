"""PyTorch modules as graphs; the one place below `workloads` that imports torch."""
