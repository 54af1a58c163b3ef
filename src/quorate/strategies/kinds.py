"""What a worker needs of a strategy, and how the one of its job is found."""

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Protocol

import torch

from quorate.checkpoint.store import CheckpointFolder
from quorate.collectives.endpoint import Endpoint
from quorate.collectives.reduction import Reduction
from quorate.core.generation import Role
from quorate.observe.events import BlocksPlaced, LinksMeasured
from quorate.replica.gradients import Gradients
from quorate.replica.replica import Replica, Sharding
from quorate.replica.state_layout import StateLayout
from quorate.spec.job import JobSpec
from quorate.task.progress import Progress
from quorate.training.activity import Activity
from quorate.training.strategy import Strategy
from quorate.training.update import Update


class Connection(Protocol):
    """A worker that is connected to the other members of its generation.

    Whoever closes the `links` between the members ends every wait of this generation. In `gradients` the hosted lanes
    leave theirs, and the update finds their sum.

    The session has `align` copy state: every member then holds what it is to hold before the first step. It gives the
    progress that this one has then, and the bytes that were copied; `hold` is told a progress that this member has come
    to, whatever happens after. `placed` says who holds which share of the parameters; None where every worker holds all
    of them. `measure` says how this worker is joined to the next one: all members call it before the first step, if a
    job is tracked. `strategy` is what the loop trains with in this generation; where that is not from step to step, the
    connection has a `loop`: a kind of Loop, which runs instead of the usual one. It may be closed already.
    """

    @property
    def links(self) -> Reduction: ...

    @property
    def gradients(self) -> Gradients: ...

    def align(
        self, progress: Progress, activity: Activity, hold: Callable[[Progress], None]
    ) -> tuple[Progress, int]: ...

    def placed(self) -> BlocksPlaced | None: ...

    def measure(self) -> LinksMeasured: ...

    def strategy(self, update: Update, activity: Activity) -> Strategy: ...

    def close(self) -> None: ...


class StrategyFactory(Protocol):
    """Made once in each member; the session has it connect to the other members at the beginning of each generation,
    for as long as the endpoint's deadline lasts. `layout` is how the state is spread over the members."""

    @property
    def layout(self) -> StateLayout: ...

    def connect(self, endpoint: Endpoint) -> Connection: ...


@dataclass(frozen=True)
class Holdings:
    """What a process has besides its replica. `lane_memory` is the descriptor of memory that is held for what lanes
    keep, `folder` has the job's checkpoints."""

    role: Role = Role.WORKER
    lane_memory: int | None = None
    folder: CheckpointFolder | None = None


def sharding_of(spec: JobSpec, worker: int, workers: int, place: torch.device) -> Sharding | None:
    """What builds the model of a worker that holds a part of it; None where each holds all."""
    make: Callable[..., Sharding] | None = resolve_name(spec.strategy.sharding) if spec.strategy.sharding else None
    return None if make is None else make(spec, worker, workers, place)


def strategy_factory(spec: JobSpec, replica: Replica, held: Holdings | None = None) -> StrategyFactory:
    """The one that a job asks for."""
    make: Callable[[JobSpec, Replica, Holdings], StrategyFactory] = resolve_name(spec.strategy.made_by)
    return make(spec, replica, held or Holdings())
