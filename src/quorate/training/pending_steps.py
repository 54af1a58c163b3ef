"""Steps that a device still computes while the loop goes on: they are completed in order, some steps later."""

from collections import deque
from collections.abc import Callable
from itertools import takewhile
from time import perf_counter
from typing import NamedTuple

from quorate.core.worker_status import COMPUTE
from quorate.training.activity import Activity
from quorate.training.strategy import PendingStep, StepOutcome

LAG = 8
"""So many steps may have been begun on a device of which the host has read nothing yet."""


class Timing(NamedTuple):
    """What a step has taken: from one to the next, and this worker's time in each phase."""

    elapsed: float
    seconds: dict[str, float]


class Laps:
    """A stopwatch: from one completed step to the next."""

    def __init__(self) -> None:
        self.last = perf_counter()

    def lap(self, steps: int = 1) -> float:
        """Seconds since the last one. Several steps that are completed at once have taken what they took together."""
        now = perf_counter()
        elapsed, self.last = max(now - self.last, 1e-9) / steps, now
        return elapsed


class PendingSteps:
    """The model is ahead of the loop's progress by these: nothing that looks at the one by the other may happen before
    they are completed. `complete` counts and tells a step."""

    def __init__(self, activity: Activity, laps: Laps, complete: Callable[[int, StepOutcome, Timing], None]) -> None:
        self._activity = activity
        self._laps = laps
        self._complete = complete
        self._begun: deque[tuple[int, PendingStep, dict[str, float]]] = deque()

    def __len__(self) -> int:
        return len(self._begun)

    def add(self, step: int, pending: PendingStep) -> None:
        """One more, with how long this worker was busy with it; those that have arrived are completed."""
        self._begun.append((step, pending, self._activity.seconds))
        self._complete_arrived(LAG)

    def complete_all(self) -> None:
        """Before an evaluation, a save or the end, before a step that is read at once, and on every way out."""
        if self._begun:
            place = self._activity.phase, self._activity.lane
            self._complete_arrived(0)
            self._activity.phase, self._activity.lane = place  # which a report of trouble names

    def _complete_arrived(self, most: int) -> None:
        """Those whose numbers are there; the first is waited for while there are more than `most`."""
        while self._begun:
            arrived = sum(1 for _ in takewhile(lambda begun: begun[1].arriving.is_there(), self._begun))
            if not arrived:
                if len(self._begun) <= most:
                    return
                self._activity.enter(COMPUTE)
                self._begun[0][1].arriving()
                self._activity.leave()
                arrived = 1
            elapsed = self._laps.lap(arrived)
            for _ in range(arrived):
                self._complete_first(elapsed)

    def _complete_first(self, elapsed: float) -> None:
        step, pending, seconds = self._begun[0]
        try:
            outcome = pending.finish()
        except BaseException:
            # What was begun after it is not told, and not saved.
            self._begun.clear()
            self._activity.step, self._activity.lane = step, None
            raise
        self._begun.popleft()
        self._complete(step, outcome, Timing(elapsed, seconds))
