"""The module itself, with hooks: what all else is compared with."""
