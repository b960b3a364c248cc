"""Sweeps beyond one process: shares of a plan, the workers that run them, and the simulation of both."""
