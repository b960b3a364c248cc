"""A program as a graph: what depends on what, which of it is affine, what modules take and return."""
