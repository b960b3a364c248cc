"""The version of conewise: the one place where the number stands. What builds the package reads it here."""

__version__ = "0.1.0"
