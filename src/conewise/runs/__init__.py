"""Runs of a captured model: values, forks in which sites are patched, interventions, metrics."""
