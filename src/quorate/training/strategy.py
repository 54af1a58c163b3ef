"""What the loop asks of a strategy: how the lanes' gradients become one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from quorate.data.ledger import Tally
from quorate.training.lane import LaneResult, LossSum

SAVE = "save"
"""A checkpoint is begun here, besides those that the job's steps ask for."""
BREAK = "break"
"""The generation ends here, at a step boundary, to let somebody in or go; the job goes on in the next."""
BEGIN_AND_BREAK = "begin a save and break"
"""Both: the save goes on in the next generation."""
SAVE_AND_BREAK = "save and break"
"""A break with a checkpoint that is committed before: nobody who stays holds the state."""
BOUNDARIES = frozenset({SAVE, BREAK, BEGIN_AND_BREAK, SAVE_AND_BREAK})


def strongest_wish(wishes: Sequence[str | None]) -> str | None:
    """What all do of what some have been asked to: end the job before anything else, and rather save than not."""
    asked = {wish for wish in wishes if wish is not None}
    if stops := [wish for wish in wishes if wish in asked - BOUNDARIES]:
        return stops[0]
    if asked >= {SAVE, BREAK}:
        asked.add(BEGIN_AND_BREAK)
    return next((wish for wish in (SAVE_AND_BREAK, BEGIN_AND_BREAK, BREAK, SAVE) if wish in asked), None)


@dataclass(frozen=True)
class Skipped:
    """A step that is void: the lanes whose loss is not finite, and the samples that they have read."""

    lanes: tuple[int, ...]
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Agreement:
    """What all workers know, and know alike, after the exchange of a step. Nothing of a step that `is_void` may reach
    the state. `bad` samples were left out; `why` says of the first of them what is wrong. `data_s` are the seconds that
    the worker which waited longest has waited for data, `put_back` the names of what user code has assigned."""

    samples: int
    tally: Tally
    present: int
    losses: dict[str, LossSum]
    log: dict[str, float]
    buffers: dict[str, torch.Tensor]
    stop: str | None
    skipped: Skipped | None = None
    bad: tuple[int, ...] = ()
    why: tuple[tuple[int, str], ...] = ()
    data_s: float = 0.0
    put_back: tuple[str, ...] = ()

    @property
    def planned(self) -> int:
        """How many samples the step was to have, by which each lane has weighted its gradient."""
        return self.samples + len(self.bad)

    @property
    def is_void(self) -> bool:
        """Whether the step changes nothing: a loss is not finite, or no lane has a single sample."""
        return self.skipped is not None or not self.samples


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
