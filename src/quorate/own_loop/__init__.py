"""A training loop of one's own, run in turns as the lanes of a job."""
