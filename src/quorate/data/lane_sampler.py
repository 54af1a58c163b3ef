"""Which samples each lane reads at each step: a pure function of the job, never of who reads."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy
import torch

from quorate.core.digests import derive_seed
from quorate.core.errors import JobError, TaskError
from quorate.core.user_code import user_code
from quorate.data.indices import Indices
from quorate.data.ledger import Tally
from quorate.data.sampler import Sampler
from quorate.data.streams import seed_generators
from quorate.lanes.chunks import cut
from quorate.spec.job import JobSpec

Order = Callable[[int, torch.Generator], Sequence[int] | None]


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
        self.check_trainable("The training set" if self.epoch_length == samples else "An epoch of order()")

    def is_own(self, epoch: int) -> bool:
        if epoch not in self._own:
            self._epoch(epoch)
        return self._own[epoch]

    def planned(self, epoch: int) -> Tally:
        return Tally.of_order(epoch, self._epoch(epoch))

    def dropped(self, epoch: int) -> Indices:
        return self._epoch(epoch)[self.steps_per_epoch * self.spec.batch_size :]

    def batch(self, step: int) -> Indices:
        start = (step - 1) % self.steps_per_epoch * self.spec.batch_size
        return self._epoch(self.epoch_of(step))[start : start + self.spec.batch_size]

    def share(self, step: int, lane: int) -> Indices:
        batch = self.batch(step)
        return batch[cut(len(batch), self.spec.lanes)[lane]]

    def _epoch_order(self, epoch: int) -> Indices:
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
