"""The commands, one module for each or for a small group of them."""
