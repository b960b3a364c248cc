"""What it must cost: closed forms over graphs, never reading the engine."""
