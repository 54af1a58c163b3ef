"""How fast steps go by, and so how long the rest takes."""

from collections import deque

SPACING = 0.5
MARKS = 60


class Pace:
    """Steps and the times at which they ended, the recent ones only: a job that slows down says so soon.

    Marks are apart by half a second at least. Of steps that take less, the last sixty would be a moment too short to
    hold an evaluation or a checkpoint, and the time left would jump about.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[int, float]] = deque(maxlen=MARKS)
        self._latest: tuple[int, float] | None = None

    def passed(self, step: int, time: float) -> None:
        """A step has ended."""
        # After a restart steps are told again: what was measured before says nothing about now.
        if self._latest is not None and step <= self._latest[0]:
            self._marks.clear()
        self._latest = (step, time)
        if not self._marks or time - self._marks[-1][1] >= SPACING:
            self._marks.append(self._latest)

    @property
    def seconds_per_step(self) -> float | None:
        """How long a step takes at present; none until two have been seen."""
        if self._latest is None or self._latest[0] == self._marks[0][0]:
            return None
        (first_step, first_time), (last_step, last_time) = self._marks[0], self._latest
        # The clock of the wall may be set back meanwhile.
        return max(0.0, last_time - first_time) / (last_step - first_step)
