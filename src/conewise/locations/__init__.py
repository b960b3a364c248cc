"""Names for parts of a model, and many of them at once."""
