"""Text that a model writes while its values are changed."""
