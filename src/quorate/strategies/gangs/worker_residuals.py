"""What PowerSGD holds back of each worker's gradient, to be sent later: the error feedback of a gang."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quorate.checkpoint.tree import Encoded, decode
from quorate.lanes.buckets import Bucket
from quorate.strategies.compression.layout import WithResiduals
from quorate.strategies.compression.residuals import Residuals
from quorate.strategies.gangs.power_sgd import PowerSgd
from quorate.training.progress import Progress
from quorate.training.state_layout import HeldState

FACTORS = "factors"
"""Under which name they are in a state."""


class WorkerResiduals(Residuals):
    """What each worker of a gang has held back, whose lanes are one gradient: it is kept with the first of them.

    On another number of workers whoever hosts such a lane has it, and one that hosts several adds them up: the sum over
    all workers, by which the steps to come are decided, stays what it was.
    """

    def __init__(self, plan: Sequence[Bucket], lanes: int, descriptor: int | None = None) -> None:
        super().__init__(plan, lanes, descriptor)
        self._slots = {slot.index: (number, slot) for number, bucket in enumerate(plan) for slot in bucket.slots}
        self._before: list[tuple[torch.Tensor, ...]] = []
        self._after: tuple[torch.Tensor, ...] = ()

    def begin(self) -> None:
        """Write down what is held back after another step from now on."""
        kept = [lane for lane in self._hosted if lane in self._keepers] if self.applied else []
        self._before = [self._memory.at(lane, self.applied) for lane in kept]
        self._after = self._memory.begin(self._hosted.start, self.applied)

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


@dataclass(frozen=True)
class WithFactors(WithResiduals):
    """Besides what workers have held back, the factors that PowerSGD begins its next step with: all have those."""

    power_sgd: PowerSgd

    def state(self, progress: Progress) -> HeldState:
        held = super().state(progress)
        named = {f"{FACTORS}.{index}": factor for index, factor in sorted(self.power_sgd.factors.items())}
        factors = {name.partition(".")[2]: {"tensor": name} for name in named}
        skeleton = {"dict": held.encoded.skeleton["dict"] | {FACTORS: {"dict": factors}}}
        return replace(held, encoded=Encoded(skeleton, held.encoded.tensors | named), compared=held.compared | named)

    def load(self, encoded: Encoded) -> Progress:
        fields = dict(encoded.skeleton["dict"])
        factors = decode(fields.pop(FACTORS, {"dict": {}}), encoded.tensors)
        self.power_sgd.load({int(index): factor for index, factor in factors.items()})
        return super().load(Encoded({"dict": fields}, encoded.tensors))
