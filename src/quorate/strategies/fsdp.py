"""The `fsdp` strategy: every worker holds a part of the state, and FSDP2 gathers and sums on the way.

What workers agree on besides gradients is as on the ring. All of them compute in step: whoever makes another number of
passes than the others would have them wait for ever.
"""

import json
import logging
from collections.abc import Callable, Sequence

from quorate.checkpoint.store import CheckpointFolder
from quorate.core.digests import weights_digest
from quorate.core.errors import StateLost, TaskError, UnsupportedModelError
from quorate.core.generation import Member, name_of, names_of
from quorate.reduce.connect import Endpoint, connect
from quorate.reduce.connect_devices import connect_devices
from quorate.reduce.process_group import GroupLinks, ProcessGroup
from quorate.reduce.reduction import Reduction
from quorate.spec.job import JobSpec
from quorate.strategies.agreement import StepAgreement, WorkerNote
from quorate.strategies.ring import RingConnection, RingStrategy
from quorate.strategies.state_copy import align
from quorate.training.activity import Activity
from quorate.training.device import digests
from quorate.training.lane import LaneResult
from quorate.training.optimizers import SOLE
from quorate.training.progress import Progress
from quorate.training.replica import Replica
from quorate.training.sharded_gradients import ShardedGradients
from quorate.training.sharded_layout import Sharded
from quorate.training.sharded_model import settle
from quorate.training.sharded_passes import Passes
from quorate.training.sharded_tensors import local
from quorate.training.strategy import StepOutcome, StepRequest, Strategy
from quorate.training.update import Update

DIGEST_INDEX = 13
"""Tells the digests of all parts from what else is gathered."""

log = logging.getLogger(__name__)


class FsdpFactory:
    """Connects the workers of a mesh in each generation of a job."""

    def __init__(self, spec: JobSpec, replica: Replica, folder: CheckpointFolder | None) -> None:
        sharding = replica.sharding
        assert sharding is not None
        if list(replica.optimizers.by_name) != [SOLE]:
            raise TaskError(
                "optimizer() gives several optimizers, each of which has a backward pass of its own: that is not "
                "possible with strategy: fsdp. Return one, with a group of parameters for each."
            )
        self._spec = spec
        self._replica = replica
        self._folder = folder
        self._world, self._passes = sharding.world, sharding.passes
        self.layout = Sharded(replica, self._world.shape, self._world.worker)

    def connect(self, endpoint: Endpoint) -> "FsdpConnection":
        """Waits for the other workers."""
        device, world = self._replica.device, self._world
        links, _ = (
            connect(endpoint, ()) if device.is_host else connect_devices(endpoint, (), device.shareable, device.zeros)
        )
        try:
            groups = world.connect(endpoint, links, self._spec.nccl.timeout)
        except BaseException:
            links.close()
            raise
        hosted = world.shape.lanes_of(world.worker, self._spec.lanes)
        gradients = ShardedGradients(self._replica.trainable, hosted, world, self._passes)
        joined = GroupLinks(links, *groups)
        return FsdpConnection(self._spec, self._replica, endpoint, joined, gradients, groups, self.layout, self._folder)


class FsdpConnection(RingConnection):
    """One worker's connection to the others of its generation."""

    def __init__(
        self,
        spec: JobSpec,
        replica: Replica,
        endpoint: Endpoint,
        links: Reduction,
        gradients: ShardedGradients,
        groups: Sequence[ProcessGroup],
        layout: Sharded,
        folder: CheckpointFolder | None,
    ) -> None:
        super().__init__(spec, replica, endpoint, links, gradients)
        sharding = replica.sharding
        assert sharding is not None
        self._world, self._passes = sharding.world, sharding.passes
        self._sharded = gradients
        self._groups = groups
        self._layout = self._parts = layout
        self._folder = folder

    def align(self, progress: Progress, activity: Activity, hold: Callable[[Progress], None]) -> tuple[Progress, int]:
        """Whoever holds another state than the generation goes on with copies it from a replica of its part. Where
        there is none, all who have to take it up again from the checkpoint."""
        generation, worker = self._endpoint.generation, self._endpoint.credentials.worker
        progress, size = align(generation, worker, self.links, self._layout, progress, activity)
        if progress.cursor != generation.cursor:
            progress = self._restored()
            hold(progress)
        return progress, size

    def _restored(self) -> Progress:
        cursor = self._endpoint.generation.cursor
        found = () if self._folder is None else self._folder.list()
        info = next((info for info in found if info.cursor == cursor), None)
        if info is None or self._folder is None:
            raise StateLost(f"a part of the state is lost, and there is no checkpoint of step {cursor.step}.")
        log.info("takes up the checkpoint of step %d again: a part of the state was lost", cursor.step)
        return self._layout.load(self._folder.load(info, self._layout.boxes).encoded)

    def weights_digest(self) -> str:
        """That of all parts: of another mesh it is another one."""
        step = self._endpoint.generation.cursor.step
        own = json.dumps(digests(self._parts.weights().items(), self._replica.device)).encode()
        everybody = [json.loads(payload) for payload in self.links.gather(step, DIGEST_INDEX, own)]
        return weights_digest({name: digest for told in everybody for name, digest in told.items()})

    def _bytes_per_step(self) -> int | None:
        return None

    def strategy(self, update: Update, activity: Activity) -> Strategy:
        replica, generation = self._replica, self._endpoint.generation
        own = generation.members[self._endpoint.position]
        parameters = [local(parameter) for _, parameter in replica.trainable]
        skips = self._spec.on_poison == "skip"
        agreement = ShardedAgreement(
            self.links.gather, generation.workers, own, parameters, replica.buffers, None, skips=skips
        )
        agreement.follow(self._passes)
        hosted = self._world.shape.lanes_of(self._world.worker, self._spec.lanes)
        return FsdpStrategy(own, hosted, self.links, self._sharded, agreement, update, activity)

    def close(self) -> None:
        super().close()
        self._world.disconnect()
        settle(self._replica.model)
        for group in self._groups:
            group.close()


class ShardedAgreement(StepAgreement):
    """Compares not the state, of which each worker has another part, but which units they have gathered: where these
    are not the same, torch gathers weights of one with those of another, and says nothing."""

    _passes: Passes | None = None

    def follow(self, passes: Passes) -> None:
        """From now on: other workers may be new here."""
        self._passes, passes.order = passes, 0

    def _state(self, step: int) -> int | None:  # noqa: ARG002
        return None if self._passes is None else self._passes.order

    def _compare_replicas(self, step: int, notes: Sequence[WorkerNote]) -> None:
        others = [
            member.worker for member, note in zip(self._members, notes, strict=True) if note.state != notes[0].state
        ]
        if others:
            raise UnsupportedModelError(
                f"In step {step}, or in the evaluation before it, {names_of(others)} went through other parts of the "
                f"model than {name_of(self._members[0].worker)}. With strategy: fsdp all workers gather the weights "
                "of a part together, so which ones run, and in which order, must not depend on samples or random "
                "numbers (LayerDrop, early exits, experts chosen by an if). Run all of them and multiply by 0, gather "
                "them together (strategy.units), or use ddp."
            )


class FsdpStrategy(RingStrategy):
    """Gradients are summed by the time the last lane is done. Of the lanes that several workers compute together, one
    of them speaks."""

    def __init__(
        self,
        own: Member,
        hosted: range,
        links: Reduction,
        gradients: ShardedGradients,
        agreement: StepAgreement,
        update: Update,
        activity: Activity,
    ) -> None:
        super().__init__(own, links, gradients, agreement, update, activity)
        self.hosted = hosted
        self._spoken_for = own.lanes

    def advance(self, step: int, results: Sequence[LaneResult], request: StepRequest) -> StepOutcome:
        return super().advance(step, [result for result in results if result.lane in self._spoken_for], request)
