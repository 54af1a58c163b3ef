"""What happens to a coordinator, and what it wants done: the two sides of `decide`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quorate.core.failure import Failure
from quorate.core.generation import Cursor, Generation, GenerationId, Pace, Position, WorkerStatus
from quorate.observe.event import Event


@dataclass(frozen=True)
class Reading:
    """The lane that a worker was in, and the samples of an epoch that it has: `count`, of which `samples` are known."""

    lane: int
    epoch: int = 0
    samples: tuple[int, ...] = ()
    count: int = 0


@dataclass(frozen=True)
class Registered:
    """A worker asks for its place."""

    worker: int
    pid: int
    host: str
    address: str
    facts: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    cursor: Cursor = field(default_factory=Cursor)
    local_address: str = ""
    # Where it stands, if it was registered with an earlier coordinator.
    position: Position | None = None

    @property
    def process(self) -> tuple[int, str, str]:
        """What tells one process from another that asks for the same place."""
        return self.pid, self.host, self.address


@dataclass(frozen=True)
class HeartbeatReceived:
    """A worker is alive, and tells where it is and what happened meanwhile."""

    worker: int
    generation: GenerationId
    sequence: int
    status: WorkerStatus
    events: tuple[str, ...] = ()
    pid: int = 0
    # It has been asked to leave, by whoever owns its machine.
    is_leaving: bool = False
    # How long its own work took since the last heartbeat, if it has completed steps.
    pace: Pace | None = None


@dataclass(frozen=True)
class StateReported:
    """A worker has left its generation. It stands at `cursor`, and takes nothing more of that generation.

    The coordinator goes on from such promises only. `symptom` is the broken link that made it leave, if it was one.
    `is_saved`: there is a checkpoint of where it stands. `has_trained`: what it holds is the state of the job, and not
    just a beginning, nor what its generation was to give up for a checkpoint.
    """

    worker: int
    pid: int
    generation: GenerationId
    cursor: Cursor
    symptom: Failure | None = None
    is_saved: bool = False
    has_trained: bool = True


@dataclass(frozen=True)
class FailureReported:
    """A worker tells why it stops. The worker is None when it has not been registered."""

    worker: int | None
    failure: Failure
    pid: int = 0
    generation: GenerationId | None = None


@dataclass(frozen=True)
class ExitReported:
    """The supervisor has reaped a process; exactly one of code and signal is known."""

    worker: int
    pid: int
    host: str
    exit_code: int | None
    signal: int | None
    status: WorkerStatus
    reading: Reading | None = None


@dataclass(frozen=True)
class Completed:
    """A worker is done, in a generation; None if it does not tell in which."""

    worker: int
    digest: str
    result: Mapping[str, Any] = field(default_factory=dict)
    pid: int = 0
    generation: GenerationId | None = None


@dataclass(frozen=True)
class StopRequested:
    """Somebody wants the job to stop at the next step boundary, with a checkpoint."""

    reason: str


@dataclass(frozen=True)
class ResizeRequested:
    """Somebody wants the job to go on with another number of workers, or of servers; none is as many as now. With a
    reason, that is the job itself."""

    workers: int | None = None
    servers: int | None = None
    reason: str = ""


@dataclass(frozen=True)
class SaveRequested:
    """Somebody wants a checkpoint of where the job is; `request` tells one request from another."""

    request: str


@dataclass(frozen=True)
class LauncherGone:
    """The process that started the coordinator, and that looks after the workers, has ended."""


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


MembershipEvent = (
    Registered
    | HeartbeatReceived
    | StateReported
    | FailureReported
    | ExitReported
    | Completed
    | StopRequested
    | ResizeRequested
    | SaveRequested
    | LauncherGone
    | Tick
)


# --- what a coordinator wants done; an event of the run is to be written down, and its time is that of the decision


@dataclass(frozen=True)
class Welcome:
    """Tell a worker that its place is its own."""

    worker: int
    lease: float


@dataclass(frozen=True)
class Refuse:
    """Tell a worker, or somebody who is none, that it cannot have what it asks for, and why."""

    worker: int | None
    failure: Failure


@dataclass(frozen=True)
class Recall:
    """Ask a worker of an earlier coordinator to register again, and to tell where it stands."""

    worker: int


@dataclass(frozen=True)
class GrantLease:
    """Tell a worker for how long it may act, from the sending of its heartbeat."""

    worker: int
    seconds: float


@dataclass(frozen=True)
class RecordEvents:
    """Write down what a worker tells, in its order."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class DeclareGeneration:
    """Tell every worker who hosts which lanes."""

    generation: Generation


@dataclass(frozen=True)
class Regroup:
    """Tell the members of a generation that it is over: at once, or once they have completed the step they are at.

    `saves`: they save a checkpoint before.
    """

    generation: GenerationId
    at_boundary: bool
    saves: bool = False


@dataclass(frozen=True)
class Dismiss:
    """Tell a worker that it may leave."""

    worker: int
    pid: int


@dataclass(frozen=True)
class Refill:
    """Tell the supervisor to start another process in a place."""

    worker: int
    after: float
    restore: bool


@dataclass(frozen=True)
class Expel:
    """Tell the supervisor to kill a process that counts as lost."""

    worker: int
    pid: int


@dataclass(frozen=True)
class RelayStop:
    """Tell every worker to stop at the next step boundary."""

    reason: str


@dataclass(frozen=True)
class RelaySave:
    """Tell a generation to save a checkpoint at the next step boundary; `request` tells one request from another."""

    generation: GenerationId
    request: str


@dataclass(frozen=True)
class EndJob:
    """Tell everybody that the job is over."""

    failure: Failure | None
    digest: str = ""
    result: Mapping[str, Any] = field(default_factory=dict)


Action = (
    Event
    | Welcome
    | Refuse
    | Recall
    | GrantLease
    | RecordEvents
    | DeclareGeneration
    | Regroup
    | Dismiss
    | Refill
    | Expel
    | RelayStop
    | RelaySave
    | EndJob
)
