"""What the paper does not count: edges, searches, positions, stacks of worlds."""
