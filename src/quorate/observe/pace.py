"""How fast steps go by, and so how long the rest takes."""

from collections import deque

RECENT = 50


class Pace:
    """Steps and the times at which they ended, the recent ones only: a job that slows down says so soon."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT)

    def passed(self, step: int, time: float) -> None:
        """A step has ended."""
        # After a restart steps are told again: what was measured before says nothing about now.
        if self._recent and step <= self._recent[-1][0]:
            self._recent.clear()
        self._recent.append((step, time))

    def seconds_for(self, steps: int) -> float | None:
        """How long so many steps will take; none until two have been seen."""
        if len(self._recent) < 2:
            return None
        (first_step, first_time), (last_step, last_time) = self._recent[0], self._recent[-1]
        return steps * max(0.0, last_time - first_time) / (last_step - first_step)
