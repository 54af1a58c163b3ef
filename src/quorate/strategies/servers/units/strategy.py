"""A member of a generation in which units are applied one by one: what its loop trains with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from quorate.core.generation import Generation, Member, Role
from quorate.core.worker_status import OTHERS
from quorate.reduce.reduction import Reduction
from quorate.strategies.ring import GATHER_INDEX
from quorate.strategies.servers.option import ServersSpec
from quorate.strategies.servers.share import Share
from quorate.strategies.servers.units.align import Standing
from quorate.strategies.servers.units.applied import Unit
from quorate.strategies.servers.units.channel import UnitChannel
from quorate.strategies.servers.units.held_blocks import HeldBlocks
from quorate.strategies.servers.units.hub import Hub
from quorate.strategies.servers.units.plan import UnitPlan
from quorate.strategies.servers.units.server import UnitServer
from quorate.strategies.servers.units.step_settings import StepSettings
from quorate.strategies.servers.units.worker import UnitWorker
from quorate.training.activity import Activity
from quorate.training.gradients import Gradients
from quorate.training.lane import LaneResult
from quorate.training.strategy import StepOutcome, StepRequest


@dataclass(frozen=True)
class UnitParts:
    """What a member's segments are made of in one generation."""

    generation: Generation
    own: Member
    links: Reduction
    channels: Mapping[int, UnitChannel]
    plan: UnitPlan
    share: Share
    strategy: ServersSpec
    activity: Activity
    standing: Standing


class UnitStrategy:
    """Its segments; the gathers at boundaries are those of any strategy."""

    def __init__(self, parts: UnitParts, gradients: Gradients) -> None:
        self.worker = parts.own.worker
        self.hosted = parts.own.lanes
        self.leads = parts.share.number == 0
        self.is_server = parts.share.number is not None
        self.standing = parts.standing
        self.share = parts.share
        self._parts = parts
        self._gradients = gradients
        self._server: UnitServer | None = None
        # Servers first, since they write checkpoints; those that leave behind those that stay.
        in_order = (Role.SERVER, Role.RETIRING, Role.WORKER)
        members = enumerate(parts.generation.members)
        self._order = [at for at, _ in sorted(members, key=lambda one: (in_order.index(one[1].role), one[0]))]

    @property
    def staleness(self) -> int | None:
        return self._parts.strategy.staleness if self._parts.strategy.mode == "bounded" else None

    def equip(self, settings: StepSettings, before_change: Callable[[], None]) -> HeldBlocks | None:
        """Make a server ready to apply units; it has blocks then. `before_change` raises where it may not."""
        parts = self._parts
        if not self.is_server:
            return None
        assert parts.share.units is not None, "a server has a record of units"
        position = parts.generation.position(self.worker)
        blocks = HeldBlocks(parts.share.replica, parts.share.units, settings, before_change)
        parameters = {block: parts.share.parameter(block) for block in parts.plan.held(position)}
        self._server = UnitServer(
            position,
            parts.plan,
            blocks,
            parts.channels,
            {block: (parameter.numel(), parameter.dtype) for block, parameter in parameters.items()},
            parts.generation.lanes,
            damps=parts.strategy.damping,
            sends_buffers=parts.share.replica.buffers.exist,
        )
        return blocks

    def serve(self, hub: Hub | None, look: Callable[[], None]) -> None:
        """A server: answer the workers until they have come to the boundary."""
        assert self._server is not None, "it was equipped"
        with self._parts.activity.waiting(OTHERS):
            self._server.run_segment(hub, look)

    def work(
        self,
        compute: Callable[[Unit], LaneResult],
        batch_samples: Callable[[int], int],
        wants_boundary: Callable[[], bool],
    ) -> int:
        """A worker: compute units until the boundary; where it is."""
        parts = self._parts
        worker = UnitWorker(
            parts.plan, parts.channels, parts.share.replica, compute, batch_samples, wants_boundary, parts.activity
        )
        return worker.run_segment()

    def begin(self, step: int) -> None:
        """Segments begin by themselves."""

    def advance(self, step: int, results: Sequence[LaneResult], request: StepRequest) -> StepOutcome:  # noqa: ARG002
        raise AssertionError("units are applied one by one: there is no step that all take together")

    def gather(self, step: int, payload: bytes) -> tuple[bytes, ...]:
        with self._parts.activity.waiting(OTHERS):
            told = self._parts.links.gather(step, GATHER_INDEX, payload)
        return tuple(told[position] for position in self._order)

    def close(self) -> None:
        self._parts.links.close()
        self._gradients.close()
