"""Sweeps over texts: many patched models write together, one pass for each new token."""
