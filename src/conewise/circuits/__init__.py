"""Causal tracing and circuits."""
