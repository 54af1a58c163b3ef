"""Every timeout of a job, derived from the one number that a user sets; and the time that counts for it."""

from dataclasses import dataclass

LEAST_START, LONGEST_START = 10.0, 120.0
"""Seconds that a coordinator may take to begin, however short failure_timeout is: a loaded machine starts no program
faster; and however often it was tried."""
MOST_STARTS = 6
"""So many coordinators in a row may be ended by the launcher, for they took too long, without a step in between."""
_TIMES_THE_LAST = 4
MOST_BETWEEN_HEARTBEATS = 2.0


class WatchedTime:
    """How long something lasts, as far as somebody has looked: of a pause between two looks half the limit counts at
    most. Whoever looks was held up then, perhaps with all others, and they wake up together."""

    def __init__(self, now: float) -> None:
        self._looked = now
        self._seconds = 0.0

    def look(self, now: float, limit: float) -> float:
        """The seconds that count by now, for whoever may take so many."""
        self._seconds += min(now - self._looked, limit / 2)
        self._looked = now
        return self._seconds


@dataclass(frozen=True)
class Timing:
    """How long things may take, in seconds, all from `failure_timeout`."""

    failure_timeout: float

    @property
    def heartbeat_every(self) -> float:
        """Several heartbeats may be lost before a worker counts as lost. They carry its events, too, so however long
        the timeout is, they are not far apart."""
        return min(self.failure_timeout / 10, MOST_BETWEEN_HEARTBEATS)

    @property
    def lease(self) -> float:
        """A worker stops by itself before the coordinator gives its lanes away, so it is shorter than the timeout."""
        return self.failure_timeout * 0.8

    @property
    def connect(self) -> float:
        """To find the next worker on the ring once the generation is known."""
        return self.failure_timeout * 2

    @property
    def storm(self) -> float:
        """A network may break links again and again for so long before the job is given up."""
        return self.failure_timeout * 6

    def coordinator_start(self, tries: int, last: float = 0.0) -> float:
        """What the start of a coordinator may take: longer after each of so many tries that took too long, and where
        the last one that came to listen took that many seconds. What ends it too early ends the next one, too."""
        least = max(self.failure_timeout, LEAST_START, _TIMES_THE_LAST * last)
        return min(least * 2.0**tries, self._longest_start)

    @property
    def absence(self) -> float:
        """A coordinator may be away for so long, where nobody can tell whether its launcher lives."""
        return max(self.storm, MOST_STARTS * self._longest_start)

    @property
    def _longest_start(self) -> float:
        return max(LONGEST_START, self.failure_timeout)
