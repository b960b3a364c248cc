"""Questions in text: a model and prompts as people give them, made into a `Question`."""
