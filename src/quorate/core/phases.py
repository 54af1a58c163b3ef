"""The words by which a worker says what it is doing: in its heartbeats, on its status page, in the autopsy."""

DATA, COMPUTE, EXCHANGE, APPLY = "data", "compute", "exchange", "apply"
"""The phases of a step."""
EVALUATION, CHECKPOINT = "evaluation", "checkpoint"
"""What may follow a step."""
JOIN, COPY, REGROUP = "join", "copy", "regroup"
"""Between two generations."""
WAITING = "wait"
"""In no generation yet."""

OTHERS, DISK = "the other workers", "the disk"
"""What a worker may wait for inside a phase."""
