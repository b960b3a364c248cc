"""The version of conewise: the one place where the number stands. What builds the package reads it here."""

__version__ = "0.2.0"
