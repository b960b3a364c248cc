"""Models, cones and waves as pictures."""
