"""The strategies that there are, by `strategy.kind` of the job file."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from quorate.checkpoint.store import CheckpointFolder
from quorate.core.generation import Role
from quorate.observe.events import BlocksPlaced, LinksMeasured
from quorate.reduce.connect import Endpoint
from quorate.reduce.nccl import prepare_nccl
from quorate.reduce.reduction import Reduction
from quorate.spec.job import JobSpec
from quorate.spec.nccl import NcclSpec
from quorate.spec.strategy import DdpSpec, is_gang, lane_compression
from quorate.strategies.compressed_ring import CompressedRingFactory
from quorate.strategies.ddp import DdpFactory
from quorate.strategies.parameter_server import ServersFactory
from quorate.strategies.ring import RingFactory
from quorate.training.activity import Activity
from quorate.training.gradients import Gradients
from quorate.training.progress import Progress
from quorate.training.replica import Replica
from quorate.training.state_layout import StateLayout
from quorate.training.strategy import Strategy
from quorate.training.update import Update

log = logging.getLogger(__name__)


class Connection(Protocol):
    """A worker that is connected to the other members of its generation.

    The session copies state over its links, and then has the strategy built, for whose lanes `gradients` collects.
    """

    @property
    def links(self) -> Reduction:
        """Between the members. Whoever closes them ends every wait of this generation."""
        ...

    @property
    def gradients(self) -> Gradients:
        """Where the hosted lanes leave their gradients, and where the update finds their sum."""
        ...

    def align(self, progress: Progress, activity: Activity, hold: Callable[[Progress], None]) -> tuple[Progress, int]:
        """Have every member hold what it is to hold before the first step; the progress that this one has then, and the
        bytes that were copied. `hold` is told a progress that this member has come to, whatever happens after."""
        ...

    def placed(self) -> BlocksPlaced | None:
        """Who holds which share of the parameters; None where every worker holds all of them."""
        ...

    def measure(self) -> LinksMeasured:
        """How this worker is joined to the next one. All members call it before the first step, if a job is tracked."""
        ...

    def strategy(self, update: Update, activity: Activity) -> Strategy:
        """What the loop trains with in this generation."""
        ...

    def close(self) -> None:
        """Let go of the other members. It may be closed already."""
        ...


class StrategyFactory(Protocol):
    """Made once in each member; the session calls it at the beginning of each generation."""

    @property
    def layout(self) -> StateLayout:
        """How the state is spread over the members."""
        ...

    def connect(self, endpoint: Endpoint) -> Connection:
        """Connect to the other members of a generation, for as long as the endpoint's deadline lasts."""
        ...


@dataclass(frozen=True)
class Holdings:
    """What a process has besides its replica. `lane_memory` is the descriptor of memory that is held for what lanes
    keep, `folder` has the job's checkpoints."""

    role: Role = Role.WORKER
    lane_memory: int | None = None
    folder: CheckpointFolder | None = None


Make = Callable[[JobSpec, Replica, Holdings], StrategyFactory]


def ring_factory(spec: JobSpec, replica: Replica, held: Holdings) -> StrategyFactory:
    """The ring, or the one whose gradients are compressed."""
    compress = lane_compression(spec.strategy)
    if compress is None:
        return RingFactory(spec, replica, held.role)
    return CompressedRingFactory(spec, replica, compress, held.lane_memory)


def servers_factory(spec: JobSpec, replica: Replica, held: Holdings) -> StrategyFactory:
    """Servers hold the parameters."""
    return ServersFactory(spec, replica, held.role, held.lane_memory)


def ddp_factory(spec: JobSpec, replica: Replica, held: Holdings) -> StrategyFactory:
    """A gang that sums by torch.distributed."""
    strategy = spec.strategy
    assert isinstance(strategy, DdpSpec)
    return DdpFactory(spec, replica, strategy.compress, held.lane_memory, sync_batch_norm=strategy.sync_batch_norm)


def fsdp_factory(spec: JobSpec, replica: Replica, held: Holdings) -> StrategyFactory:
    """A gang of which each holds a part."""
    from quorate.strategies.fsdp import FsdpFactory

    return FsdpFactory(spec, replica, held.folder)


FACTORIES: Mapping[str, Make] = {
    "ring": ring_factory,
    "ddp": ddp_factory,
    "fsdp": fsdp_factory,
    "parameter-server": servers_factory,
}


def strategy_factory(spec: JobSpec, replica: Replica, held: Holdings | None = None) -> StrategyFactory:
    """The one that a job asks for."""
    if is_gang(spec.strategy) and not replica.device.is_host:
        prepare_nccl(spec)
    elif given := sorted(key for key, value in spec.nccl if value != NcclSpec.model_fields[key].default):
        why = "this job computes on the host" if is_gang(spec.strategy) else "only ddp and fsdp use NCCL"
        log.warning("nccl (%s) does nothing here: %s", ", ".join(given), why)
    return FACTORIES[spec.strategy.kind](spec, replica, held or Holdings())
