"""Sweeps that are kept: stores, archives, what identifies them."""
