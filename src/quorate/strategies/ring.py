"""The `ring` strategy: synchronous, and the same bits on any number of workers."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NamedTuple

import torch

from quorate.collectives.connect import connect
from quorate.collectives.endpoint import Endpoint
from quorate.collectives.memory import GradientMemory
from quorate.collectives.reduction import Reduction
from quorate.core.generation import EXCHANGE, OTHERS, Member
from quorate.lanes.buckets import Bucket
from quorate.observe.events import LinksMeasured
from quorate.replica.device import Device
from quorate.replica.flat_gradients import FlatGradients
from quorate.replica.gradients import Gradients, LoneGradients, gradient_plan
from quorate.replica.replica import Replica
from quorate.replica.state_layout import Replicated, StateLayout
from quorate.spec.job import JobSpec
from quorate.strategies.agreement import StepAgreement
from quorate.strategies.kinds import Holdings
from quorate.task.progress import Progress
from quorate.training.activity import Activity
from quorate.training.divergence import ReplicaDigests
from quorate.training.lane import LaneResult
from quorate.training.strategy import Agreement, Lag, StepRequest, Strategy
from quorate.training.update import Update

log = logging.getLogger(__name__)

GATHER_INDEX = 2
"""Tells what the loop gathers from what the step itself does."""

_DENORMAL = 1e-310

SumAll = Callable[[int], None]
"""Sums all buckets of a step."""


class RingFactory:
    """Connects the workers of each generation of a job: in shared memory on one host, on a ring elsewhere."""

    def __init__(self, spec: JobSpec, replica: Replica, held: Holdings) -> None:  # noqa: ARG002
        self._spec = spec
        self._replica = replica
        self.layout: StateLayout = Replicated(replica)

    def connect(self, endpoint: Endpoint) -> "RingConnection":
        """Waits for the other workers. Where there is one lane, there are no buckets to be summed."""
        spec, replica = self._spec, self._replica
        plan = gradient_plan(replica.trainable, spec.bucket_mb) if spec.lanes > 1 else ()
        device, trusts_versions = replica.device, replica.optimizers.are_torchs_own
        links, memory, together = _connect(endpoint, plan, device, trusts_versions=trusts_versions)
        # Not on a host: compression and servers look for elements by their index.
        gradients = (
            FlatGradients(replica.trainable, plan, memory, as_they_lie=not device.is_host)
            if spec.lanes > 1
            else LoneGradients(replica.trainable)
        )
        return RingConnection(spec, replica, endpoint, links, gradients, self.layout, together=together)


def _connect(
    endpoint: Endpoint, plan: Sequence[Bucket], device: Device, *, trusts_versions: bool
) -> tuple[Reduction, GradientMemory, SumAll | None]:
    if device.is_host or not plan:
        return *connect(endpoint, plan, trusts_versions=trusts_versions), None
    # A job on the host imports none of it.
    from quorate.cuda.reduction import DeviceReduction, connect_devices

    links, memory = connect_devices(endpoint, plan, device.shareable, device.zeros, trusts_versions=trusts_versions)
    return links, memory, links.all_reduce_together if isinstance(links, DeviceReduction) else None


@dataclass
class RingConnection:
    """One worker's connection to the others of its generation."""

    spec: JobSpec
    replica: Replica
    endpoint: Endpoint
    links: Reduction
    gradients: Gradients
    layout: StateLayout
    together: SumAll | None = field(default=None, kw_only=True)

    @property
    def own(self) -> Member:
        return self.endpoint.generation.members[self.endpoint.position]

    def align(self, progress: Progress, activity: Activity, hold: Callable[[Progress], None]) -> tuple[Progress, int]:  # noqa: ARG002
        from quorate.strategies.state_copy import align  # where somebody is behind

        generation = self.endpoint.generation
        return align(generation, self.own.worker, self.links, self.layout, progress, activity)

    def placed(self) -> None:
        return None

    def measure(self) -> LinksMeasured:
        return measured(self.endpoint, self.links, self._bytes_per_step())

    def _bytes_per_step(self) -> int | None:
        buckets = self.gradients.total.buckets if isinstance(self.gradients, FlatGradients) else ()
        return sum(self.links.bytes_passed(bucket.numel(), bucket.itemsize) for bucket in buckets)

    def strategy(self, update: Update, activity: Activity) -> Strategy:
        replica, is_alone = self.replica, len(self.endpoint.generation.members) == 1
        parameters = [parameter for _, parameter in replica.trainable]
        agreement = self._agreement(parameters, ReplicaDigests(replica))
        agreement.audit = update.audit
        strategy = self._strategy(StepParts(self.own, self.links, self.gradients, agreement, update, activity))
        if strategy.may_lag and is_alone and not replica.device.is_host:
            from quorate.strategies.lagging import DeviceLag

            strategy.lag = DeviceLag(self.spec, replica, self.gradients, agreement, update, strategy.exchange)
        return strategy

    def _agreement(self, parameters: Sequence[torch.Tensor], digests: ReplicaDigests | None) -> StepAgreement:
        """How the workers of the generation agree on a step besides its gradients."""
        workers, skips = self.endpoint.generation.workers, self.spec.on_nonfinite_loss == "skip"
        held = parameters, self.replica.buffers, digests, self.replica.optimizers.settings
        return StepAgreement(self.links.gather, workers, self.own, *held, skips=skips)

    def _strategy(self, parts: "StepParts") -> "RingStrategy":
        return RingStrategy(parts, overlaps=self.spec.overlap and self.links.overlaps, together=self.together)

    def close(self) -> None:
        """Close the links, and let the parameters go: another generation has other gradients."""
        self.links.close()
        self.gradients.close()


def measured(endpoint: Endpoint, links: Reduction, bytes_per_step: int | None) -> LinksMeasured:
    """How a member is joined to the next one. All members call it together."""
    generation = endpoint.generation
    following = generation.members[(endpoint.position + 1) % len(generation.members)].worker
    trip = links.round_trip()
    return LinksMeasured(
        step=generation.cursor.step,
        generation=str(generation.id),
        worker=endpoint.credentials.worker,
        peer=None if trip is None else following,
        round_trip_s=None if trip is None else round(trip, 9),
        bytes_per_step=bytes_per_step,
    )


class StepParts(NamedTuple):
    """What a step is made with."""

    own: Member
    links: Reduction
    gradients: Gradients
    agreement: StepAgreement
    update: Update
    activity: Activity


class RingStrategy:
    """Sums the lanes' gradients around the ring, in the order that the job fixes.

    `overlaps`: the first buckets are summed while the backward pass still fills the others. `together` sums all buckets
    sooner than one after the other. Where it `may_lag`, steps need not be read before they are applied.
    """

    may_lag = True
    lag: Lag | None = None

    def __init__(self, parts: StepParts, *, overlaps: bool = False, together: SumAll | None = None) -> None:
        own, links, gradients, self._agreement, self._update, self._activity = parts
        self._together = together
        self.worker = own.worker
        self.hosted = own.lanes
        self.leads = 0 in own.lanes
        self._links = links
        self._gradients = gradients
        # A lone lane has nothing to sum: its gradients are where the optimizer looks for them.
        self._flat = gradients if isinstance(gradients, FlatGradients) else None
        self._sums = [] if self._flat is None else self._flat.sums
        self._reducer: OverlappedReducer | None = None
        if self._flat is not None and overlaps:
            log.info("gradients are sent while the backward pass still runs")
            self._reducer = OverlappedReducer(links, self._flat)

    def begin(self, step: int) -> None:
        self._links.spans = self._activity.spans
        if self._reducer is not None:
            self._reducer.begin(step)

    def advance(self, step: int, results: Sequence[LaneResult], request: StepRequest) -> Agreement:
        """Gradients first, since their exchange may have begun with the backward pass; then everything else."""
        self.exchange(step, results)
        agreed = self._agreement.reach(step, results, request)
        self._activity.leave()
        return self._update.apply(step, agreed)

    def exchange(self, step: int, results: Sequence[LaneResult]) -> None:  # noqa: ARG002
        """Sum the gradients of all lanes; its phase is left by whoever agrees on the step."""
        self._activity.enter(EXCHANGE)
        if self._reducer is not None:
            self._reducer.wait()
        elif self._together is not None:
            self._together(step)
        else:
            for index, (lanes, total) in enumerate(self._sums):
                self._links.all_reduce(step, index, lanes, total)

    def gather(self, step: int, payload: bytes) -> tuple[bytes, ...]:
        with self._activity.waiting(OTHERS):
            return self._links.gather(step, GATHER_INDEX, payload)

    def close(self) -> None:
        self._links.close()
        if self._reducer is not None:
            self._reducer.close()
        self._gradients.close()
        self.lag = None  # it refers to this, and such a circle would keep the gradients until somebody collects it


class OverlappedReducer:
    """A thread that sums the first buckets of a step while the backward pass still fills the others.

    It sums buckets in the order in which they are announced. From `begin` to `wait` the links are its own: nobody else
    may use them.
    """

    def __init__(self, links: Reduction, gradients: FlatGradients) -> None:
        self._links, self._sums = links, gradients.sums
        self._last = len(gradients.plan) - 1
        self._announced: SimpleQueue[tuple[int, int, bool] | None] = SimpleQueue()
        self._all_summed = threading.Event()
        self._error: BaseException | None = None
        self._step = 0
        gradients.announce(self._take)
        self._thread = threading.Thread(target=self._work, name="quorate-overlapped-reducer", daemon=True)
        self._thread.start()

    def begin(self, step: int) -> None:
        self._step = step
        self._all_summed.clear()

    def wait(self) -> None:
        """Return when every bucket of the step is summed; raise what came in between."""
        self._all_summed.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread. The links must be closed already, so that no sum keeps waiting."""
        self._announced.put(None)
        self._thread.join()
        self._error = None  # whose traceback holds the gradients

    def _take(self, index: int) -> None:
        flushes_denormals = not torch.tensor(_DENORMAL, dtype=torch.float64).mul_(1.0).item()
        self._announced.put((self._step, index, flushes_denormals))

    def _work(self) -> None:
        while (work := self._announced.get()) is not None:
            step, index, flushes_denormals = work
            if self._error is None:
                try:
                    # A mode of each thread; an addition must round like those of the thread that trains.
                    torch.set_flush_denormal(flushes_denormals)
                    self._links.all_reduce(step, index, *self._sums[index])
                except BaseException as error:
                    self._error = error
            if index == self._last:
                self._all_summed.set()
