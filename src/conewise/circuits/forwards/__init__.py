"""Worlds with removed edges: what these carry instead, and what is computed anew."""
