"""Runs of a captured model: patches, interventions, metrics."""
