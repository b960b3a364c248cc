"""Surgery on captured models: what is pruned, grafted and redefined, and what it costs."""
