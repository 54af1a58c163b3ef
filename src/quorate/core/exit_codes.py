"""How a worker's process ends of itself, where that is no failure."""

ENDED_WITH_THE_JOB = 3
"""The job was ended, by whatever failed elsewhere."""

LEFT = 4
"""It was asked to leave, and was let go."""
