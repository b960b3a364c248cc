"""A pass as a value: steps over stacks of worlds, what is put where, the memory that it takes."""
