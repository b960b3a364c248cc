"""Reverse passes of a metric as torch's autograd makes them: gradients, and what products read, counted."""
