"""What all steps of a job come to. There may be thousands of steps a second, so a step costs a few additions; metrics
are made of the sums when somebody asks for them."""

import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import cast

from quorate.core.worker_status import APPLY, COMPUTE, DATA, EXCHANGE
from quorate.observe.events import StepCompleted

PHASES = (DATA, COMPUTE, EXCHANGE, APPLY)
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
MOST_NAMES = 100
"""So many names of the task's own are shown in a family; a task that makes up more is not followed."""


class Distribution:
    """How many values lay below each of the bounds, and their sum."""

    def __init__(self, bounds: Sequence[float] = BOUNDS) -> None:
        self.total = 0.0
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Each bound with how many values were not above it; the last is all of them."""
        return list(zip([*map(str, self._bounds), "+Inf"], accumulate(self._counts), strict=True))


class NamedNumbers:
    """The last number of each name that the task has made up."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}

    def update(self, told: Mapping[str, object]) -> None:
        """What is no number is not shown."""
        for name, number in told.items():
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            if is_number and (name in self.last or len(self.last) < MOST_NAMES):
                self.last[name] = cast(float, number)


class StepSums:
    """Fed by one thread, and read by another: sums of a moment may differ by a step."""

    def __init__(self) -> None:
        self.count = self.samples = self.skipped = self.overflowed = self.bad = 0
        self.position = self.in_generation = 0
        self.waited = 0.0
        self.last: StepCompleted | None = None
        self.progressed = time.time()
        self.seconds = Distribution()
        self.by_phase = {phase: Distribution() for phase in PHASES}
        self.losses, self.learning_rates, self.gradient_norms = NamedNumbers(), NamedNumbers(), NamedNumbers()
        self.logged = NamedNumbers()
        self._phases = tuple(self.by_phase.values())

    def add(self, event: StepCompleted) -> None:
        """Count a step."""
        seconds = (event.data_s or 0.0, event.compute_s or 0.0, event.exchange_s or 0.0, event.apply_s or 0.0)
        for distribution, took in zip(self._phases, seconds, strict=True):
            distribution.add(took)
        self.seconds.add(sum(seconds))
        self.waited += max(0.0, seconds[0], event.longest_data_s or 0.0)
        self.samples += event.samples or 0
        self.bad += event.bad_samples
        self.skipped += event.skipped is not None and not event.skipped.partial
        self.overflowed += event.overflow
        self.losses.update(event.losses)
        self.learning_rates.update(event.learning_rates)
        self.gradient_norms.update(event.gradient_norms)
        if event.log:
            self.logged.update(event.log)
        self.last = event
        self.position = event.step or 0
        self.count += 1
        self.in_generation += 1
        self.progressed = time.time()

    def note_progress(self) -> None:
        """The job has got further, if not by a step."""
        self.progressed = time.time()
