"""What the clocks of several workers say about their steps, phase by phase."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


class StepClock(NamedTuple):
    """One step by one worker's clock, in seconds: when it began, and how long each phase took.

    `compute` is forward and backward. All workers read the same clock: they run on one machine.
    """

    began: float
    data: float
    forward: float
    compute: float
    exchange: float
    apply: float


@dataclass(frozen=True)
class StepPhases:
    """One step of all workers, in milliseconds."""

    wall: float
    data: float
    forward: float
    backward: float
    exchange: float
    apply: float

    @classmethod
    def of(cls, clocks: Sequence[StepClock], following: Sequence[StepClock]) -> "StepPhases":
        """From the clocks of all workers in this step and in the next one.

        A phase takes as long as the slowest worker needs. An exchange takes as long as the worker needs who came to it
        last: the others waited for that one too.
        """
        began, ended = (max(clock.began for clock in step) for step in (clocks, following))
        return cls(
            wall=(ended - began) * 1000,
            data=max(clock.data for clock in clocks) * 1000,
            forward=max(clock.forward for clock in clocks) * 1000,
            backward=max(clock.compute - clock.forward for clock in clocks) * 1000,
            exchange=min(clock.exchange for clock in clocks) * 1000,
            apply=max(clock.apply for clock in clocks) * 1000,
        )


def steps_of(everyone: Sequence[Sequence[StepClock]], warm_up: int) -> list[StepPhases]:
    """All steps but the first few, and but the last, whose end no clock tells. `everyone` has a sequence per worker."""
    steps = list(zip(*everyone, strict=True))
    return [StepPhases.of(clocks, following) for clocks, following in pairwise(steps[warm_up:])]


@dataclass(frozen=True)
class Medians:
    """The median of each phase over many steps, in milliseconds."""

    data_ms: float
    forward_ms: float
    backward_ms: float
    exchange_ms: float
    apply_ms: float

    @classmethod
    def of(cls, steps: Sequence[StepPhases]) -> "Medians":
        """Over these steps."""
        return cls(
            data_ms=statistics.median(step.data for step in steps),
            forward_ms=statistics.median(step.forward for step in steps),
            backward_ms=statistics.median(step.backward for step in steps),
            exchange_ms=statistics.median(step.exchange for step in steps),
            apply_ms=statistics.median(step.apply for step in steps),
        )

    @property
    def ideal_ms(self) -> float:
        """A step that hides the shorter of backward and exchange behind the longer, and loses nothing anywhere."""
        return self.forward_ms + max(self.backward_ms, self.exchange_ms) + self.apply_ms
