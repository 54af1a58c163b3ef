"""How a worker's process ends of itself, where its own code is not what failed."""

ENDED_WITH_THE_JOB = 3
"""The job was ended, by whatever failed elsewhere."""

LEFT = 4
"""It was asked to leave, and was let go."""

DIVERGED = 5
"""The replicas of its generation differ, so that what it holds must not be used any more."""
