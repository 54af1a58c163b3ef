"""The `fsdp` strategy: every worker holds a part of the state, and FSDP2 gathers and sums on the way.

What workers agree on besides gradients is as on the ring. All of them compute in step: whoever makes another number of
passes than the others would have them wait for ever.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from quorate.checkpoint.store import CheckpointFolder
from quorate.collectives.connect import connect
from quorate.collectives.endpoint import Endpoint
from quorate.core.errors import StateLost, TaskError
from quorate.core.generation import OTHERS
from quorate.replica.device import Device, local
from quorate.replica.gradients import refuse_rows
from quorate.replica.optimizers import SOLE
from quorate.replica.replica import Replica
from quorate.spec.job import JobSpec
from quorate.strategies.gangs.gang_gradients import GangGradients
from quorate.strategies.gangs.gang_world import SHARD, TENSOR, GangWorld
from quorate.strategies.gangs.nccl import nccl_of, prepare_nccl
from quorate.strategies.gangs.process_group import GroupLinks, ProcessGroup
from quorate.strategies.gangs.sharded_layout import Sharded
from quorate.strategies.gangs.sharded_model import Passes, ShardedModel, UnitOrder
from quorate.strategies.kinds import Holdings
from quorate.strategies.ring import RingConnection, RingStrategy, StepParts
from quorate.task.progress import Progress
from quorate.training.activity import Activity
from quorate.training.lane import LaneResult
from quorate.training.strategy import Agreement, StepRequest, Strategy
from quorate.training.update import Update

UNITS_INDEX = 12
"""Tells which units run from what else is gathered."""

log = logging.getLogger(__name__)


class ShardedGradients(GangGradients):
    """Lanes are accumulated like micro-batches; norms are those of all parts together."""

    def __init__(
        self, parameters: Sequence[tuple[str, torch.nn.Parameter]], hosted: range, world: GangWorld, passes: Passes
    ) -> None:
        super().__init__(parameters, hosted, None, overlaps=False)
        self._world = world
        self._passes = passes

    def begin(self, lane: int) -> None:
        super().begin(lane)
        if lane == self.hosted.start:
            self._passes.begin()

    def end_pass(self) -> None:
        super().end_pass()
        self._passes.end_backward()

    def finish(self) -> int:
        """Not of those that have zeros from FSDP2, which an optimizer would take for gradients."""
        bits = super().finish()
        used = (1 << index for index, parameter in enumerate(self.parameters) if self._passes.has_used(parameter))
        return bits & sum(used)

    def total_norm(self, device: Device) -> float:
        return device.numbers([self.norm()])()[0]

    def norm(self) -> torch.Tensor:
        return self.clipped_norm(self.parameters, None)

    def clipped_norm(self, parameters: Sequence[torch.Tensor], clip: float | None) -> torch.Tensor:
        gradients = [p.grad for p in parameters if p.grad is not None]
        held = [local(gradient) for gradient in gradients]
        wide = reduce(torch.promote_types, (part.dtype for part in held), torch.float32)
        # What several workers hold alike counts once.
        squares = [
            torch.linalg.vector_norm(part, dtype=wide).square() / self._copies(gradient)
            for part, gradient in zip(held, gradients, strict=True)
        ]
        # Where the group works: gradients may have gone to the host (`offload`), where NCCL does not look.
        total = (torch.stack(squares).sum() if squares else torch.zeros(())).to(self._world.device)
        dist.all_reduce(total, group=self._world.parts)
        # Before anything is made of them: all gradients were summed before this was.
        self._world.complete()
        norm = total.sqrt()
        if clip is not None and held:
            # As torch.nn.utils.clip_grad_norm_ has it.
            factor = torch.clamp(clip / (norm + 1e-6), max=1.0)
            for part in held:
                part.mul_(factor.to(part))
        return norm

    def _copies(self, gradient: torch.Tensor) -> int:
        """By how many of those who hold different parts of the state this is held alike."""
        sizes = {SHARD: self._world.shape.shard, TENSOR: self._world.shape.tensor}
        if isinstance(gradient, DTensor):
            names = gradient.device_mesh.mesh_dim_names or ()
            for name, placement in zip(names, gradient.placements, strict=True):
                if not isinstance(placement, Replicate):
                    sizes.pop(name, None)
        copies = 1
        for size in sizes.values():
            copies *= size
        return copies


class FsdpFactory:
    """Connects the workers of a mesh in each generation of a job, each of which holds a part of the state."""

    def __init__(self, spec: JobSpec, replica: Replica, held: Holdings) -> None:
        prepare_nccl(spec, on_host=replica.device.is_host)
        sharding = replica.sharding
        assert isinstance(sharding, ShardedModel)
        if list(replica.optimizers.by_name) != [SOLE]:
            raise TaskError(
                "optimizer() gives several optimizers, each of which has a backward pass of its own: that is not "
                "possible with strategy: fsdp. Return one, with a group of parameters for each."
            )
        refuse_rows(replica.model, replica.trainable, "strategy: fsdp")
        check_fused(replica.optimizers.by_name[SOLE])
        self._spec = spec
        self._replica = replica
        self._folder = held.folder
        self._world, self._passes = sharding.world, sharding.passes
        self.layout = Sharded(replica, self._world.shape, self._world.worker)

    def connect(self, endpoint: Endpoint) -> "FsdpConnection":
        """Waits for the other workers."""
        world = self._world
        links, _ = connect(endpoint, ())
        try:
            groups = world.connect(endpoint, links, nccl_of(self._spec).timeout)
        except BaseException:
            links.close()
            raise
        hosted = world.shape.lanes_of(world.worker, self._spec.lanes)
        gradients = ShardedGradients(self._replica.trainable, hosted, world, self._passes)
        held = GroupLinks(links, *groups), gradients, self.layout, world, self._passes.order, groups, self._folder
        return FsdpConnection(self._spec, self._replica, endpoint, *held)


def check_fused(optimizer: torch.optim.Optimizer) -> None:
    """Refuse fused kernels that torch does not have for parts of parameters: its first step would fail."""
    kind = type(optimizer)
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    if is_fused and kind in (torch.optim.SGD, torch.optim.Adagrad):
        raise TaskError(
            f"optimizer() gives {kind.__name__} with fused=True, for which torch has no kernel where each worker has "
            "a part of each parameter (strategy: fsdp). Leave `fused` out, or use AdamW."
        )


@dataclass
class FsdpConnection(RingConnection):
    """One worker's connection to the others of its generation."""

    gradients: ShardedGradients
    layout: Sharded
    world: GangWorld
    order: UnitOrder
    groups: Sequence[ProcessGroup]
    folder: CheckpointFolder | None

    def align(self, progress: Progress, activity: Activity, hold: Callable[[Progress], None]) -> tuple[Progress, int]:
        """Whoever holds another state than the generation goes on with copies it from a replica of its part. Where
        there is none, all who have to take it up again from the checkpoint."""
        progress, size = super().align(progress, activity, hold)
        if progress.cursor != self.endpoint.generation.cursor:
            progress = self._restored()
            hold(progress)
        return progress, size

    def _restored(self) -> Progress:
        cursor = self.endpoint.generation.cursor
        found = () if self.folder is None else self.folder.list()
        info = next((info for info in found if info.cursor == cursor), None)
        if info is None or self.folder is None:
            raise StateLost(f"a part of the state is lost, and there is no checkpoint of step {cursor.step}.")
        log.info("returns to the checkpoint of step %d: a part of the state was lost", cursor.step)
        return self.layout.load(self.folder.load(info, self.layout.boxes).encoded)

    def _bytes_per_step(self) -> int | None:
        return None

    def strategy(self, update: Update, activity: Activity) -> Strategy:
        generation = self.endpoint.generation
        agreement = self._agreement([local(parameter) for _, parameter in self.replica.trainable], None)
        with activity.waiting(OTHERS):
            self.order.follow(partial(self.links.gather, generation.cursor.step, UNITS_INDEX), generation.workers)
        parts = StepParts(self.own, self.links, self.gradients, agreement, update, activity)
        return FsdpStrategy(parts, self.gradients.hosted, self.order)

    def close(self) -> None:
        super().close()
        self.order.leave()
        self.world.disconnect()
        self.replica.settle()
        for group in self.groups:
            group.close()


class FsdpStrategy(RingStrategy):
    """Gradients are summed by the time the last lane is done. Of the lanes that several workers compute together, one
    of them speaks."""

    def __init__(self, parts: StepParts, hosted: range, order: UnitOrder) -> None:
        super().__init__(parts)
        self._order = order
        self.hosted = hosted
        self._spoken_for = parts.own.lanes

    def begin(self, step: int) -> None:
        super().begin(step)
        self._order.begin(step)

    def advance(self, step: int, results: Sequence[LaneResult], request: StepRequest) -> Agreement:
        self._order.end()
        return super().advance(step, [result for result in results if result.lane in self._spoken_for], request)

    def gather(self, step: int, payload: bytes) -> tuple[bytes, ...]:
        self._order.end()
        return super().gather(step, payload)
