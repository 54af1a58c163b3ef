"""The words by which a worker says what it is doing: in its heartbeats, on its status page, in the autopsy."""

from dataclasses import dataclass

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


@dataclass(frozen=True)
class WorkerStatus:
    """How far a worker is, as far as is known, and what it is doing.

    `moves` is another number whenever it has come any further; `waits_for`: who or what it waits for in its phase.
    """

    step: int | None = None
    phase: str = ""
    moves: int = 0
    waits_for: str = ""
