"""What happens to a coordinator: who calls, and what passes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quorate.core.failure import Failure
from quorate.core.generation import Cursor, GenerationId
from quorate.core.worker_status import Pace, Position, WorkerStatus


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
