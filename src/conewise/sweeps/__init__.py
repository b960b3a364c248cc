"""Sweeps: many worlds, one baseline, one demand."""
