"""What a coordinator wants done. An event is to be written down; its time is that of the decision."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quorate.core.failure import Failure
from quorate.core.generation import Generation, GenerationId
from quorate.observe.event import Event


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
