"""The reverse pass of a metric as torch's autograd makes it: what its products read, counted."""
