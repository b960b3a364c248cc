"""The demo: what it asks of a model, and what it says."""
