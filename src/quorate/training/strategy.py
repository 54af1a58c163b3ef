"""What the loop asks of a strategy: how the lanes' gradients become one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from quorate.training.lane import LaneResult, LossSum


@dataclass(frozen=True)
class Agreement:
    """What all workers know, and know alike, after the exchange of a step."""

    samples: int
    present: int
    losses: dict[str, LossSum]
    log: dict[str, float]
    buffers: dict[str, torch.Tensor]
    stop: str | None


class Strategy(Protocol):
    """Carries a step's results between workers. The loop calls it from one thread."""

    @property
    def worker(self) -> int:
        """Who this worker is."""
        ...

    @property
    def hosted(self) -> range:
        """The lanes that this worker hosts."""
        ...

    def begin(self, step: int) -> None:
        """A step begins: from now on its gradients may be exchanged as they become ready."""
        ...

    def exchange(self, step: int, results: Sequence[LaneResult], stop: str | None) -> Agreement:
        """Sum the gradients of all lanes where `Gradients` finds them, and agree on everything else of the step.

        `stop` is this worker's wish to end; all workers learn of it here and so end at the same step.
        """
        ...

    def share(self, step: int, payload: bytes) -> tuple[bytes, ...]:
        """Everyone's payload, in lane order, on every worker."""
        ...

    def close(self) -> None:
        """Let go of the other workers."""
        ...
