"""What leads to an answer: causal tracing, circuits."""
