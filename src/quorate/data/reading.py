"""What one worker will read, in the order in which it will: known in advance, so it can be fetched in advance."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy

from quorate.core.cursor import Cursor, Phase
from quorate.data.indices import Indices, indices_of
from quorate.data.sample_order import SampleOrder


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


@dataclass(frozen=True)
class EvaluationPlan:
    """The batches of an evaluation, fixed by the job; batch i is evaluated by whoever hosts lane i mod lanes."""

    samples: int
    batch_size: int
    lanes: int
    every: int | str

    @property
    def batches(self) -> int:
        """How many batches an evaluation has."""
        return -(-self.samples // self.batch_size)

    def request(self, batch: int) -> Request:
        """What one batch reads."""
        start = batch * self.batch_size
        samples = numpy.arange(start, min(start + self.batch_size, self.samples), dtype=numpy.int64)
        return Request(Source.VALIDATION, 0, samples, batch % self.lanes)

    def hosted_batches(self, hosted: range) -> Iterator[int]:
        """The batches that the host of these lanes evaluates."""
        return (batch for batch in range(self.batches) if batch % self.lanes in hosted)

    def is_due(self, step: int, sampler: SampleOrder) -> bool:
        """Whether the job evaluates after this step; it always does after the last one."""
        if self.samples == 0 or step == 0:
            return False
        return step == sampler.total_steps or self.has_effects(step, sampler)

    def has_effects(self, step: int, sampler: SampleOrder) -> bool:
        """Whether the rate and the patience react to the evaluation after this step.

        Not to one that is there only because the job ends: a longer job has none at that step.
        """
        if self.every == "epoch":
            return sampler.ends_epoch(step)
        return isinstance(self.every, int) and step % self.every == 0


def reading_plan(sampler: SampleOrder, evaluation: EvaluationPlan, hosted: range, cursor: Cursor) -> Iterator[Request]:
    """Every request that the host of these lanes makes after `cursor`, to the end of the job."""
    if cursor.phase is Phase.TRAINED and evaluation.is_due(cursor.step, sampler):
        yield from (evaluation.request(batch) for batch in evaluation.hosted_batches(hosted))
    for step in range(cursor.step + 1, sampler.total_steps + 1):
        for lane in hosted:
            for samples in sampler.micro_batches(step, lane):
                yield Request(Source.TRAINING, sampler.epoch_of(step), samples, lane)
        if evaluation.is_due(step, sampler):
            yield from (evaluation.request(batch) for batch in evaluation.hosted_batches(hosted))
