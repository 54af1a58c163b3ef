"""One lane's part of a step: forward and backward over its micro-batches, from the committed buffers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from quorate.core.digests import derive_seed
from quorate.core.spans import BACKWARD, FORWARD, SpanRecorder
from quorate.core.user_code import RAISED, Hint, blame_user_code
from quorate.data.indices import NO_INDICES, Indices
from quorate.data.ledger import NOTHING, Tally
from quorate.replica.gradients import Gradients
from quorate.replica.losses import GivenLoss, LossSum, Number, Unread, checked_losses
from quorate.replica.optimizers import SOLE
from quorate.replica.replica import Replica
from quorate.replica.state_watch import StateWatch
from quorate.task.task import LOG, Task, take_log

SEEDS_AHEAD = 32
ASIDE = -1
"""In the place of a lane's number, for one that is computed in the place of a hosted one."""


@dataclass
class LaneResult:
    """What a lane contributes besides its gradient; `read` are the samples that it has read, `tally` adds them up, and
    `bad` are those that could not be read and were left out; `why` says of the first of these what is wrong. `data_s`
    are the seconds that its worker has waited for them, `put_back` the names of what user code has assigned.

    `log` has sums and counts of what the task has logged, and of its metrics where the step computes them.

    Its samples were cut into so many `micro_batches`. `shortage` says how its memory ran out: then it is void.
    `losses` and `log` are not there before what is `unread` was brought from the device, nor are `buffers`, the changed
    ones, where all of them were `taken`: `LaneRunner.read` does both. `digests`, where they are asked for, are that of
    its gradient and then those of its tensors.
    """

    lane: int
    samples: int
    present: int = 0
    losses: dict[str, LossSum] = field(default_factory=dict)
    log: dict[str, tuple[float, float]] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    tally: Tally = NOTHING
    read: Indices = field(default_factory=lambda: NO_INDICES)
    bad: tuple[int, ...] = ()
    why: tuple[tuple[int, str], ...] = ()
    data_s: float = 0.0
    put_back: tuple[str, ...] = ()
    unread: Unread | None = None
    micro_batches: int = 1
    shortage: str = ""
    taken: tuple[torch.Tensor, ...] | None = None
    digests: tuple[int, ...] = ()

    def take_up(self, number: Number) -> None:
        """Take up the losses and logged numbers: `number` gives each tensor of what is unread, in its order."""
        unread, self.unread = self.unread, None
        if unread is None:
            return
        self.losses = unread.sums(number)
        if unread.logged:
            self.log = {**self.log, **unread.logged_sums(number)}
        if unread.digests:
            from quorate.replica.lane_digest import joined_halves  # where they are asked for

            self.digests = joined_halves([number(half) for half in unread.digests])


def unread_scalars(results: Sequence[LaneResult]) -> list[torch.Tensor]:
    """What these lanes have left on the device, in the order in which they read it."""
    return [scalar for result in results if result.unread is not None for scalar in result.unread.scalars()]


class MicroBatch(NamedTuple):
    """A lane's samples that go through the model at once, of a step with `batch_samples`. `is_last`: the lane has no
    other."""

    content: Any
    samples: int
    batch_samples: int
    is_last: bool


Eager = Callable[[MicroBatch, SpanRecorder | None], list[GivenLoss]]


class Captures(ABC):
    """What a device has recorded of a worker's lanes. Kept through all generations."""

    @property
    @abstractmethod
    def number(self) -> int:
        """How many graphs there are."""

    @abstractmethod
    def run(self, batch: MicroBatch, gradients: Gradients, spans: SpanRecorder | None, eager: Eager) -> list[GivenLoss]:
        """Replay what is recorded, so that a lane has collected the gradient of one micro-batch more; else run the
        task's own code, by `eager`."""

    @abstractmethod
    def lane_ended(self, assigned: Sequence[str]) -> None:
        """Told what user code has assigned."""

    @abstractmethod
    def take_notes(self) -> list[str]:
        """What is to be told of how lanes are run, each thing once."""

    @abstractmethod
    def forget(self) -> None:
        """Begin again: nothing is where it was."""


@dataclass(eq=False)
class LaneRunner:
    """Runs lanes one after another on the worker's replica. `ended` is called with the number of each whose gradient is
    complete; `on_lane` gets that gradient, as it lies."""

    task: Task
    replica: Replica
    gradients: Gradients
    watch: StateWatch
    seed: int
    graphs: Captures | None = None
    ended: Callable[[int], None] | None = None
    on_lane: Callable[[Sequence[torch.Tensor]], None] | None = None
    _seeds: dict[tuple[int, int], int] = field(default_factory=dict)
    _slot: int | None = None
    _has_begun: bool = False  # a lane: of one that has not, the gradients are still those of the one before

    def __post_init__(self) -> None:
        self._device, self._spec = self.replica.device, self.replica.spec
        device = self._device
        self._is_plain = device.is_host and device.precision == "fp32" and not device.compiles_loss

    @contextmanager
    def aside(self, slot: int) -> Iterator[None]:
        """Lanes that are run or abandoned within it take the place of this hosted lane, which has to be run afterwards;
        their gradients are not sent."""
        self._slot, self.gradients.announces = slot, False
        try:
            yield
        finally:
            self._slot, self.gradients.announces = None, True

    def run(
        self,
        step: int,
        lane: int,
        batches: Sequence[tuple[int, Any]],
        batch_samples: int,
        spans: SpanRecorder | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> LaneResult:
        """Gradient of one lane; `batches` are (samples, batch) pairs, `batch_samples` the size of the global batch.

        `meanwhile` is called when the device has got all that it has to do for the lane.
        """
        slot = self._slot
        result = LaneResult(lane, sum([samples for samples, _ in batches]), read=NO_INDICES)
        if not batches:
            self.gradients.clear(lane)
            return result
        device, put_back = self._device, self.watch.before_lane()
        self._pin_threads()
        device.seed(self._seeds.get((step, lane)) or self._seed_of(step, lane))
        self.gradients.begin(lane if slot is None else slot)
        self._has_begun = True
        result.unread, losses = Unread(), list[GivenLoss]()
        for number, (samples, content) in enumerate(batches, 1):
            is_last = number == len(batches)
            batch = MicroBatch(content, samples, batch_samples, is_last)
            if self.graphs is None:
                losses = self._run_eagerly(batch, spans)
            else:
                losses = self.graphs.run(batch, self.gradients, spans, self._run_eagerly)
            # What is read at once needs no copy.
            result.unread.losses += losses if is_last and device.is_host else [loss.kept() for loss in losses]
            if vars(self.task).get(LOG):
                result.unread.logged.append((samples, take_log(self.task)))
        del losses  # or the graph of the last would take its memory until the lane has ended
        self._end(step, result, batches, meanwhile)
        assigned = self.watch.after_lane()
        if self.graphs is not None:
            self.graphs.lane_ended(assigned)
        result.put_back = (*put_back, *assigned)
        # A loss() that sets another number sets it for the rest of its lane: the next may run in another process.
        self._pin_threads()
        self._has_begun = False
        return result

    def _end(
        self,
        step: int,
        result: LaneResult,
        batches: Sequence[tuple[int, Any]],
        meanwhile: Callable[[], None] | None,
    ) -> None:
        """All of a lane is computed: take down what it has come to."""
        lane, slot, replica, device = result.lane, self._slot, self.replica, self._device
        result.present = self.gradients.finish()
        if self.ended is not None:
            self.ended(lane if slot is None else ASIDE)
        if self.on_lane is not None:
            from quorate.replica.lane_digest import collected  # where somebody disturbs the worker on purpose

            self.on_lane(collected(self.gradients, by_tensor=False)[0])
        if self._spec.record is not None:
            self.digest(result)
        if meanwhile is not None:
            meanwhile()
        if device.is_host:
            result.take_up(torch.Tensor.item)
        if replica.buffers.exist:
            result.taken = replica.buffers.take()
            if result.taken is None:
                result.buffers = replica.buffers.take_changes()
        if (every := self._spec.train_metrics_every) is not None and step % every == 0 and slot is None:
            result.log = {**self._metrics(step, lane, batches), **result.log}

    def read(self, results: Sequence[LaneResult]) -> None:
        """Wait for what these lanes have left on the device."""
        numbers = iter(self._device.numbers(unread_scalars(results))())
        for result in results:
            result.take_up(lambda _: next(numbers))
            if result.taken is not None:
                result.buffers, result.taken = self.replica.buffers.changes_in(result.taken), None

    def _pin_threads(self) -> None:
        if torch.get_num_threads() != self._spec.threads:
            torch.set_num_threads(self._spec.threads)

    def digest(self, result: LaneResult, *, by_tensor: bool = False) -> None:
        """Add the digest of the lane that has just ended to its result, and those of its tensors if asked for."""
        is_made = result.digests or (result.unread is not None and result.unread.digests)
        if not result.samples or (is_made and not by_tensor):
            return
        from quorate.replica.lane_digest import collected, lane_digests

        groups = collected(self.gradients, by_tensor=False)
        if by_tensor or self._spec.record == "tensors":
            groups += collected(self.gradients, by_tensor=True)
        found = lane_digests(groups, self._device)
        if self._device.is_host:
            result.digests = tuple(int(each) for each in found)
        else:
            result.unread = result.unread or Unread()
            result.unread.digests = [each for each in found if isinstance(each, torch.Tensor)]

    def _run_eagerly(self, batch: MicroBatch, spans: SpanRecorder | None) -> list[GivenLoss]:
        """The task's own code, forward and backward; the losses are still on the device."""
        replica, samples = self.replica, batch.samples
        began = 0.0 if spans is None else spans.clock()
        content = batch.content if self._is_plain else replica.device.move(batch.content)
        try:
            if self._is_plain:
                loss = self.task.loss(replica.model, content)
            else:
                with replica.device.autocast():
                    loss = replica.device.compiled(self.task.loss)(replica.model, content)
        except RAISED as error:
            blame_user_code(error, "loss()", self._hint_of(batch))
            raise
        if spans is not None:
            began = spans.pass_on(FORWARD, began)
        losses = checked_losses(loss, samples, replica.optimizers.by_name)
        for position, (name, _, value, _, per_item) in enumerate(losses, 1):
            weight = 1.0 if per_item else samples / batch.batch_samples
            scale = replica.loss_scale
            start = weight if scale is None else scale.times(torch.full_like(value, weight))
            # One optimizer: the plain backward pass, so that one lane gives the bits of a hand-written loop.
            inputs = None if name == SOLE else replica.optimizers.parameters(name)
            is_last = batch.is_last and name == SOLE
            try:
                self.gradients.backward(value, start, inputs, retain=position < len(losses), is_last=is_last)
            except RAISED as error:
                blame_user_code(error, "backward()", self._hint_of(batch))
                raise
        if spans is not None:
            spans.pass_on(BACKWARD, began)
        return losses

    def _hint_of(self, batch: MicroBatch) -> Hint:
        from quorate.task.hints import Share, hint_for  # rarely

        return partial(hint_for, share=Share(batch.samples, batch.batch_samples, self.replica.spec))

    def _metrics(self, step: int, lane: int, batches: Sequence[tuple[int, Any]]) -> dict[str, tuple[float, float]]:
        """What metrics() gives of the lane's samples, by the weights with which the step began. The gradient and the
        buffers of the lane are safe by now; each lane begins with its own random numbers."""
        from quorate.training.measurement import as_written, evaluation_mode, measure

        replica, totals = self.replica, dict[str, LossSum]()
        with as_written(replica), evaluation_mode(replica.model):
            for number, (samples, content) in enumerate(batches):
                replica.begin_batch()
                seed = derive_seed(self.seed, "train metrics", step, lane, number)
                found = measure(self.task, replica, content, samples, seed)
                for metric in found.accumulated.values():
                    metric.reset()  # these are of evaluations only
                for name, (total, count) in found.sums.items():
                    if name != "loss":  # which the step has
                        totals.setdefault(name, LossSum()).add(LossSum(total, count))
                replica.settle()
        replica.begin_lane()
        take_log(self.task)
        return {name: (sums.total, sums.count) for name, sums in totals.items()}

    def abandon(self, lane: int) -> None:
        """Memory ran out in the middle of a lane: leave nothing of it behind, and let nobody wait for its gradient."""
        had_begun, self._has_begun = self._has_begun, False
        if had_begun:
            self.gradients.abandon(lane)
        else:
            self.gradients.clear(lane)
        if self.graphs is not None:
            self.graphs.forget()  # they keep memory of their own
        take_log(self.task)
        self.watch.put_back()
        if had_begun:  # and not after it, in the update
            self.watch.check_settings()

    def _seed_of(self, step: int, lane: int) -> int:
        """Of many steps at once, which takes a fraction of the time that each takes within its step."""
        steps = range(step, step + SEEDS_AHEAD)
        self._seeds = {key: value for key, value in self._seeds.items() if key[0] >= step}
        self._seeds |= {(each, lane): derive_seed(self.seed, "lane", each, lane) for each in steps}
        return self._seeds[step, lane]
