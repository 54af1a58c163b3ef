"""What is made of a run's events for others: experiment trackers, metrics, traces, notifications."""
