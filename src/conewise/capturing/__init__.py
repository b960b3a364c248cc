"""A module and an example become a program."""
