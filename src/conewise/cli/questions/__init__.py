"""From options to what is asked: a model, its sites, prompts, workers."""
