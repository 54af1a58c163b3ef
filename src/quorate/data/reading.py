"""What one worker will read, in the order in which it will: known in advance, so it can be fetched in advance."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from quorate.core.cursor import Cursor, Phase
from quorate.data.sample_order import SampleOrder


class Source(Enum):
    """Which of the task's datasets."""

    TRAINING = "training"
    VALIDATION = "validation"


@dataclass(frozen=True)
class Request:
    """Samples that are fetched and collated together, and the lane that they are for."""

    source: Source
    epoch: int
    indices: tuple[int, ...]
    lane: int = field(default=0, compare=False)


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
        indices = tuple(range(start, min(start + self.batch_size, self.samples)))
        return Request(Source.VALIDATION, 0, indices, batch % self.lanes)

    def hosted_batches(self, hosted: range) -> Iterator[int]:
        """The batches that the host of these lanes evaluates."""
        return (batch for batch in range(self.batches) if batch % self.lanes in hosted)

    def is_due(self, step: int, curriculum: SampleOrder) -> bool:
        """Whether the job evaluates after this step; it always does after the last one."""
        if self.samples == 0 or step == 0:
            return False
        return step == curriculum.total_steps or self.has_effects(step, curriculum)

    def has_effects(self, step: int, curriculum: SampleOrder) -> bool:
        """Whether the rate and the patience react to the evaluation after this step.

        Not to one that is there only because the job ends: a longer job has none at that step.
        """
        if self.every == "epoch":
            return curriculum.ends_epoch(step)
        return isinstance(self.every, int) and step % self.every == 0


def reading_plan(
    curriculum: SampleOrder, evaluation: EvaluationPlan, hosted: range, cursor: Cursor
) -> Iterator[Request]:
    """Every request that the host of these lanes makes after `cursor`, to the end of the job."""
    if cursor.phase is Phase.TRAINED and evaluation.is_due(cursor.step, curriculum):
        yield from (evaluation.request(batch) for batch in evaluation.hosted_batches(hosted))
    for step in range(cursor.step + 1, curriculum.total_steps + 1):
        for lane in hosted:
            for indices in curriculum.micro_batches(step, lane):
                yield Request(Source.TRAINING, curriculum.epoch_of(step), indices, lane)
        if evaluation.is_due(step, curriculum):
            yield from (evaluation.request(batch) for batch in evaluation.hosted_batches(hosted))
