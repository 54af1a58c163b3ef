"""What PowerSGD holds back of each worker's gradient, to be sent later: the error feedback of a gang."""

from collections.abc import Sequence

import torch

from quorate.lanes.buckets import Bucket
from quorate.training.residuals import Residuals


class WorkerResiduals(Residuals):
    """What each worker of a gang has held back, whose lanes are one gradient: it is kept with the first of them.

    On another number of workers whoever hosts such a lane has it, and one that hosts several adds them up: the sum over
    all workers, by which the steps to come are decided, stays what it was.
    """

    def __init__(self, plan: Sequence[Bucket], lanes: int, *, descriptor: int | None = None) -> None:
        super().__init__(plan, lanes, descriptor=descriptor)
        self._slots = {slot.index: (number, slot) for number, bucket in enumerate(plan) for slot in bucket.slots}
        self._before: list[tuple[torch.Tensor, ...]] = []
        self._after: tuple[torch.Tensor, ...] = ()

    def begin(self) -> None:
        """Write down what is held back after another step from now on."""
        kept = [lane for lane in self._hosted if lane in self._keepers] if self.applied else []
        self._before = [self._memory.at(lane, self.applied)[0] for lane in kept]
        self._after = self._memory.begin(self._hosted.start, self.applied)[0]

    def held(self, index: int) -> torch.Tensor | None:
        """What was held back of a parameter; None where that is nothing yet."""
        flat = [self._place(buckets, index) for buckets in self._before]
        return sum(flat[1:], flat[0]) if flat else None

    def hold(self, index: int, rest: torch.Tensor) -> None:
        """What is held back of a parameter after this step."""
        self._place(self._after, index).copy_(rest.reshape(-1))

    def seal(self, step: int) -> None:
        """All is written down. Only then may others get what the step cannot be completed without."""
        self._memory.seal(self._hosted.start, step)

    def commit(self, step: int) -> None:
        super().commit(step)
        self._keepers = tuple(hosted.start for hosted in self._hosting)

    def _place(self, buckets: Sequence[torch.Tensor], index: int) -> torch.Tensor:
        bucket, slot = self._slots[index]
        return buckets[bucket][slot.offset : slot.offset + slot.numel]
