"""Which samples each lane reads at each step, as those see it who read them: the loop, its feed and the ledger."""

from abc import abstractmethod
from typing import Any, Protocol

import numpy

from quorate.core.errors import TaskError
from quorate.data.indices import Indices
from quorate.data.ledger import Tally
from quorate.lanes.chunks import cut
from quorate.spec.job import JobSpec


class SampleOrder(Protocol):
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

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch; the incomplete last one counts only if the job keeps it."""
        whole, rest = divmod(self.epoch_length, self.spec.batch_size)
        return whole + (1 if rest and self.spec.last_batch == "keep" else 0)

    @property
    def total_steps(self) -> int:
        """Steps in the whole job."""
        if self.spec.steps is not None:
            return self.spec.steps
        return (self.spec.epochs or 0) * self.steps_per_epoch

    def epoch_of(self, step: int) -> int:
        """The epoch that a step belongs to."""
        return (step - 1) // self.steps_per_epoch

    def ends_epoch(self, step: int) -> bool:
        """Whether an epoch is complete after this step."""
        return step % self.steps_per_epoch == 0

    def batch_samples(self, step: int) -> int:
        """How many samples the lanes read at a step, all together."""
        start = (step - 1) % self.steps_per_epoch * self.spec.batch_size
        return min(self.spec.batch_size, self.epoch_length - start)

    def batch(self, step: int) -> Indices:
        """Indices of the whole batch of a step, lane after lane."""
        return numpy.concatenate([self.share(step, lane) for lane in range(self.spec.lanes)])

    def micro_batches(self, step: int, lane: int) -> tuple[Indices, ...]:
        """What a lane reads at a step: the indices of each micro-batch, the empty ones left out."""
        share = self.share(step, lane)
        parts = [share[part] for part in cut(len(share), self.spec.accumulate)] if self.spec.accumulate > 1 else [share]
        return tuple(part for part in parts if len(part))

    def is_own(self, epoch: int) -> bool:  # noqa: ARG002
        """Whether the order of an epoch is the task's own, which may repeat samples and leave some out."""
        return False

    def planned(self, epoch: int) -> Tally:
        """The tally of a whole epoch, also of those that no step reads."""
        return Tally.of_all(epoch, self.samples)

    def describe(self) -> dict[str, Any]:
        """What else the beginning of a run tells of how it reads."""
        return {}

    def check_trainable(self, what: str) -> None:
        """Refuse an epoch without a single step."""
        if self.steps_per_epoch == 0:
            raise TaskError(
                f"{what} has {self.epoch_length} samples, less than one batch (batch_size: {self.spec.batch_size}), "
                f"and `last_batch: drop` leaves out what does not fill a batch. Use a batch_size of at most "
                f"{self.epoch_length}, or `last_batch: keep`."
            )
