"""Which samples each lane reads at each step, and the requests that follow from it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

import numpy

from quorate.core.cached import cached_property
from quorate.core.digests import derive_seed
from quorate.core.errors import JobError, TaskError
from quorate.core.generation import Cursor, Phase
from quorate.core.user_code import user_code
from quorate.data.indices import Indices, indices_of
from quorate.data.ledger import Tally
from quorate.lanes.chunks import cut
from quorate.spec.job import JobSpec

PLANNED = 32
"""Steps that are planned at a time."""

MicroBatchChanges = tuple[tuple[int, int], ...]
"""(step, number): from which step on a lane cuts its samples into how many micro-batches, beyond `accumulate`."""


def micro_batch_count(accumulate: int, changes: MicroBatchChanges, step: int) -> int:
    """Into how many micro-batches each lane cuts its samples of a step."""
    return max([accumulate, *(count for since, count in changes if since <= step)]) if changes else accumulate


def steps_in(spec: JobSpec, samples: int) -> int:
    """Batches in an epoch; the incomplete last one counts only if the job keeps it."""
    whole, rest = divmod(samples, spec.batch_size)
    return whole + (1 if rest and spec.last_batch == "keep" else 0)


def refuse_short(spec: JobSpec, samples: int, what: str = "The training set") -> None:
    """Refuse an epoch of so many samples where they do not make a single step."""
    if steps_in(spec, samples) == 0:
        raise TaskError(
            f"{what} has {samples} samples, less than one batch (batch_size: {spec.batch_size}), and `last_batch: "
            f"drop` leaves out what does not fill a batch. Use a batch_size of at most {samples}, or `last_batch: "
            "keep`."
        )


class Sampler(ABC):
    """The order of a job's training samples, cut into epochs, steps, lanes and micro-batches.

    A pure function of the job, never of who reads. Steps count from 1, epochs from 0. `samples` are those of the
    training set, `epoch_length` those of an epoch, also those that no step reads.
    """

    spec: JobSpec
    samples: int
    epoch_length: int

    @abstractmethod
    def share(self, step: int, lane: int) -> Indices:
        """Indices of a lane's part of a batch, in order."""

    @abstractmethod
    def dropped(self, epoch: int) -> Indices:
        """What `last_batch: drop` leaves out of an epoch, in order."""

    @cached_property
    def steps_per_epoch(self) -> int:
        return steps_in(self.spec, self.epoch_length)

    @property
    def total_steps(self) -> int:
        if self.spec.steps is not None:
            return self.spec.steps
        return (self.spec.epochs or 0) * self.steps_per_epoch

    def epoch_of(self, step: int) -> int:
        return (step - 1) // self.steps_per_epoch

    def ends_epoch(self, step: int) -> bool:
        return step % self.steps_per_epoch == 0

    def batch_samples(self, step: int) -> int:
        """How many samples the lanes read at a step, all together."""
        start = (step - 1) % self.steps_per_epoch * self.spec.batch_size
        return min(self.spec.batch_size, self.epoch_length - start)

    def batch(self, step: int) -> Indices:
        """Indices of the whole batch of a step, lane after lane."""
        return numpy.concatenate([self.share(step, lane) for lane in range(self.spec.lanes)])

    def micro_batches(self, step: int, lane: int, changes: MicroBatchChanges = ()) -> tuple[Indices, ...]:
        """What a lane reads at a step: the indices of each micro-batch, the empty ones left out."""
        share, count = self.share(step, lane), micro_batch_count(self.spec.accumulate, changes, step)
        if count == 1:
            return (share,) if len(share) else ()
        return tuple(share[part] for part in cut(len(share), count) if part.start < part.stop)

    def requests(self, step: int, lane: int, changes: MicroBatchChanges) -> "list[Request]":
        """What a lane asks for at a step, a micro-batch each."""
        epoch, parts = self.epoch_of(step), self.micro_batches(step, lane, changes)
        return [Request(Source.TRAINING, epoch, samples, lane) for samples in parts]

    def is_own(self, epoch: int) -> bool:  # noqa: ARG002
        """Whether the order of an epoch is the task's own, which may repeat samples and leave some out."""
        return False

    def planned(self, epoch: int) -> Tally:
        """The tally of a whole epoch, also of those that no step reads."""
        return Tally.of_order(epoch, range(self.samples))

    def describe(self) -> dict[str, Any]:
        """What else the beginning of a run tells of how it reads."""
        return {}


Order = Callable[[int, Any], Sequence[int] | None]
"""With the epoch and a generator of torch."""


class LaneSampler(Sampler):
    """The order of samples that are read one by one: all shuffled in every epoch, or in an order of the task's own.

    `order(epoch, generator)` may return None for an ordinary shuffle.
    """

    def __init__(self, spec: JobSpec, samples: int, order: Order) -> None:
        self.spec = spec
        self.samples = samples
        self._order = order
        self._own: dict[int, bool] = {}
        self._epoch = lru_cache(maxsize=2)(self._epoch_order)
        self.epoch_length = len(self._epoch(0))
        if self.epoch_length == 0:
            raise TaskError("order() returned no samples for epoch 0, so there is nothing to train on.")
        whole = self.epoch_length == samples
        refuse_short(spec, self.epoch_length, "The training set" if whole else "An epoch of order()")

    def is_own(self, epoch: int) -> bool:
        if epoch not in self._own:
            self._epoch(epoch)
        return self._own[epoch]

    def planned(self, epoch: int) -> Tally:
        return Tally.of_order(epoch, self._epoch(epoch))

    def dropped(self, epoch: int) -> Indices:
        return self._epoch(epoch)[self.steps_per_epoch * self.spec.batch_size :]

    def share(self, step: int, lane: int) -> Indices:
        start = (step - 1) % self.steps_per_epoch * self.spec.batch_size
        batch = self._epoch(self.epoch_of(step))[start : start + self.spec.batch_size]
        return batch[cut(len(batch), self.spec.lanes)[lane]]

    def _epoch_order(self, epoch: int) -> Indices:
        import torch  # only here: who shows a run needs none

        from quorate.data.streams import seed_generators

        # The first epoch is ordered before the first step, where a mistake costs nothing yet.
        trouble = TaskError if epoch == 0 else JobError
        seed = derive_seed(self.spec.seed, "order", epoch)
        generator = torch.Generator().manual_seed(seed)
        # order() may draw from the global generators all the same; workers reach an epoch at different moments.
        seed_generators(seed)
        with user_code("order()", exit_code=trouble.exit_code):
            chosen = self._order(epoch, generator)
            self._own[epoch] = chosen is not None
            if chosen is None:
                return torch.randperm(self.samples, generator=generator).numpy()
            order = numpy.asarray([int(index) for index in chosen], dtype=numpy.int64)
        if epoch > 0 and len(order) != self.epoch_length:
            raise JobError(
                f"order() returned {len(order)} samples for epoch {epoch} and {self.epoch_length} for epoch 0. "
                "Every epoch of a job must have the same length."
            )
        outside = order[(order < 0) | (order >= self.samples)]
        if len(outside):
            raise trouble(
                f"order() names sample {outside[0]} in epoch {epoch}, "
                f"but the training set has samples 0 to {self.samples - 1}."
            )
        return order


class Source(Enum):
    """Which of the task's datasets."""

    TRAINING = "training"
    VALIDATION = "validation"


class Request:
    """Samples that are fetched and collated together, and the lane that they are for."""

    __slots__ = ("epoch", "lane", "numbers", "source")

    def __init__(self, source: Source, epoch: int, samples: Sequence[int] | Indices, lane: int = 0) -> None:
        self.source = source
        self.epoch = epoch
        # An array as long as nobody needs the samples one by one: thousands of Python's numbers take longer than the
        # rest of a small batch.
        self.numbers = indices_of(samples)
        self.lane = lane

    @property
    def indices(self) -> tuple[int, ...]:
        """The samples one by one, as a dataset is asked for them."""
        return tuple(self.numbers.tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Request):
            return NotImplemented
        is_alike = self.source is other.source and self.epoch == other.epoch
        return is_alike and (self.numbers is other.numbers or self.numbers.tobytes() == other.numbers.tobytes())

    def __hash__(self) -> int:
        return hash((self.source, self.epoch, self.numbers.tobytes()))

    def __repr__(self) -> str:
        return f"Request({self.source.value}, epoch {self.epoch}, samples {self.indices}, lane {self.lane})"


class StepPlan(NamedTuple):
    """What is known of a step beforehand: how many samples its lanes read together, into how many micro-batches each
    cuts its own, and the requests of the hosted ones. `own_order`: that of the epoch is the task's own."""

    step: int
    epoch: int
    samples: int
    micro_batches: int
    ends_epoch: bool
    own_order: bool
    requests: Mapping[int, list[Request]]


class StepPlans(dict[int, StepPlan]):
    """The plans of steps for the host of these lanes, made for many of an epoch at once; those long past are gone."""

    def __init__(self, sampler: Sampler, hosted: Sequence[int], changes: MicroBatchChanges) -> None:
        super().__init__()
        self._sampler, self._hosted, self.changes = sampler, hosted, changes

    def __missing__(self, step: int) -> StepPlan:
        sampler = self._sampler
        epoch = sampler.epoch_of(step)
        for past in [each for each in self if each < step - PLANNED]:
            del self[past]
        # An order of the task's own is asked for when its epoch begins.
        for each in range(step, min(step + PLANNED, (epoch + 1) * sampler.steps_per_epoch + 1)):
            count = micro_batch_count(sampler.spec.accumulate, self.changes, each)
            requests = {lane: sampler.requests(each, lane, self.changes) for lane in self._hosted}
            ends, own_order = sampler.ends_epoch(each), sampler.is_own(epoch)
            self[each] = StepPlan(each, epoch, sampler.batch_samples(each), count, ends, own_order, requests)
        return self[step]


@dataclass(frozen=True)
class EvaluationPlan:
    """The batches of an evaluation, fixed by the job; batch i is evaluated by whoever hosts lane i mod lanes. With
    `in_step` all hosts, who have as many lanes each, evaluate as many: some batches twice, to the same. What is `done`
    is left out."""

    samples: int
    batch_size: int
    lanes: int
    every: int | str
    in_step: bool = False
    done: frozenset[int] = frozenset()

    @property
    def batches(self) -> int:
        return -(-self.samples // self.batch_size)

    def request(self, batch: int) -> Request:
        start = batch * self.batch_size
        samples = numpy.arange(start, min(start + self.batch_size, self.samples), dtype=numpy.int64)
        return Request(Source.VALIDATION, 0, samples, batch % self.lanes)

    def hosted_batches(self, hosted: range) -> Iterator[int]:
        """The batches that the host of these lanes evaluates."""
        own = [batch for batch in range(self.batches) if batch % self.lanes in hosted and batch not in self.done]
        yield from own
        if self.in_step and not self.done:
            # The first host has the most.
            most = sum(batch % self.lanes < len(hosted) for batch in range(self.batches))
            yield from range(most - len(own))

    def is_due(self, step: int, sampler: Sampler) -> bool:
        """Whether the job evaluates after this step; it always does after the last one."""
        if self.samples == 0 or step == 0:
            return False
        return step == sampler.total_steps or self.has_effects(step, sampler)

    def has_effects(self, step: int, sampler: Sampler) -> bool:
        """Whether the rate, the patience and the best of later steps depend on the evaluation after this step.

        Not to one that is there only because the job ends: a longer job has none at that step.
        """
        if self.every == "epoch":
            return sampler.ends_epoch(step)
        return isinstance(self.every, int) and step % self.every == 0


def planned_requests(
    sampler: Sampler,
    evaluation: EvaluationPlan,
    hosted: range,
    cursor: Cursor,
    changes: MicroBatchChanges = (),
    audited: Callable[[int], Sequence[int]] = lambda _: (),
) -> Iterator[Request]:
    """Every request that the host of these lanes makes after `cursor`, to the end of the job; `audited` are the lanes
    of a step that it reads for an audit, before its own."""
    if cursor.phase is Phase.TRAINED and evaluation.is_due(cursor.step, sampler):
        yield from (evaluation.request(batch) for batch in evaluation.hosted_batches(hosted))
    for step in range(cursor.step + 1, sampler.total_steps + 1):
        others = audited(step)
        for lane in (*others, *hosted):
            for samples in sampler.micro_batches(step, lane, changes):
                # Whoever reads ahead would wait for the next turn of a lane that has none.
                yield Request(Source.TRAINING, sampler.epoch_of(step), samples, lane if lane in hosted else hosted[0])
        if evaluation.is_due(step, sampler):
            yield from (evaluation.request(batch) for batch in evaluation.hosted_batches(hosted))
