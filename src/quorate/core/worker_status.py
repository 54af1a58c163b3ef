"""What a worker tells of itself: where it stands, what it does, how long that takes it, and how its process ended."""

from dataclasses import dataclass, field

from quorate.core.generation import Cursor, Generation


@dataclass(frozen=True)
class WorkerStatus:
    """How far a worker is, as far as is known, and what it is doing.

    `moves` is another number whenever it has come any further; `waits_for`: who or what it waits for in its phase.
    """

    step: int | None = None
    phase: str = ""
    moves: int = 0
    waits_for: str = ""


@dataclass(frozen=True)
class Position:
    """Its latest generation, if it has been in one. If it `has_left` that, it stands at `cursor` until the next.

    `has_trained`: what it holds is the state of the job, and not just a beginning.
    """

    generation: Generation | None = None
    cursor: Cursor = field(default_factory=Cursor)
    has_left: bool = True
    has_trained: bool = False


@dataclass(frozen=True)
class Pace:
    """Mean seconds over so many steps: `data_s` and `compute_s` for each lane that it hosts, `apply_s` for a step.

    `lanes` is how many it hosted at the last of these steps.
    """

    steps: int
    lanes: int
    data_s: float
    compute_s: float
    apply_s: float

    @property
    def lane_s(self) -> float:
        return self.data_s + self.compute_s

    @property
    def work_s(self) -> float:
        """Seconds that a step takes of its own time."""
        return self.lanes * self.lane_s + self.apply_s


# --- what it is doing: in its heartbeats, on its status page, in the autopsy

DATA, COMPUTE, EXCHANGE, APPLY = "data", "compute", "exchange", "apply"
"""The phases of a step."""
EVALUATION, CHECKPOINT, TURN = "evaluation", "checkpoint", "turn"
"""What may follow a step; the last is the user's code between two steps, in a training loop of one's own."""
JOIN, COPY, REGROUP = "join", "copy", "regroup"
"""Between two generations."""
WAITING = "wait"
"""In no generation yet."""

OTHERS, DISK = "the other workers", "the disk"
"""What a worker may wait for inside a phase."""

# --- how its process ends of itself, where that is no failure of the job

ENDED_WITH_THE_JOB = 3
"""The job was ended, by whatever failed elsewhere."""
LEFT = 4
"""It was asked to leave, and was let go."""
GAVE_UP = 5
"""It cannot go on, and has told why; another in its place can."""
DIVERGED = 6
"""The replicas of its generation differ, so that what it holds must not be used any more."""

# --- what an engine says in the place of an exit code: numbers that no process can end with, whatever its task calls

ENDED_WITH_ITS_GROUP = 257
"""Another process of a group that is started and ended as one was lost, and so this one was ended."""
LOST_WITH_ITS_HOST = 258
"""Its host is lost, or ended by whoever runs it: nobody has seen how the process ended."""
ENDED_FOR_A_STOP = 259
"""The launcher has killed it: it, or what it had started, was stopped (SIGSTOP) for too long."""
