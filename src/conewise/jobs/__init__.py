"""Long jobs: progress, workers, shares, and what identifies a job."""
