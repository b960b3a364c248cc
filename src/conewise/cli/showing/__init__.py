"""Plans and results as commands show them."""
