"""What a sweep will compute, and at what cost."""
