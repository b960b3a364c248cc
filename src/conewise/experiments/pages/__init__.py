"""Results on a page: tables, figures, files."""
