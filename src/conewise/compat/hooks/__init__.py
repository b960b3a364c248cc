"""Named values of a captured model: how each is read and changed, and the weights that make it."""
