"""The options of the commands, groups of them, and their help."""
