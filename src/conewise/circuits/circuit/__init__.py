"""A circuit as a value: its edges and scores, its evaluation, its files."""
