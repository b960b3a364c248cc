"""Searches for circuits, edge by edge."""
