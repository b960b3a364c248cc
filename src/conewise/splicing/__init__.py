"""Dictionaries in a captured model: sparse autoencoders and transcoders, with their error terms."""
