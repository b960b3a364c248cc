"""Attention: found in the graph by what is computed, with the axes of all its values."""
