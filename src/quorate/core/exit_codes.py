"""How a worker's process ends of itself, where that is no failure of the job."""

ENDED_WITH_THE_JOB = 3
"""The job was ended, by whatever failed elsewhere."""

LEFT = 4
"""It was asked to leave, and was let go."""

GAVE_UP = 5
"""It cannot go on, and has told why; another in its place can."""

DIVERGED = 6
"""The replicas of its generation differ, so that what it holds must not be used any more."""
