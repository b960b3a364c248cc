"""What counts become in seconds, and the fits that they are calibrated by."""
