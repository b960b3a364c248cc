"""The reactive core: a graph says what is computed, a world holds values over it. No torch."""
