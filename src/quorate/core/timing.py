"""Every timeout of a job, derived from the one number that a user sets; the time that counts for it; what the clock of
another machine says; and time, waiting and threads for code that the simulator runs as well."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

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
        return min(least * 2.0**tries, max(LONGEST_START, self.failure_timeout))

    @property
    def absence(self) -> float:
        """A coordinator may be away for so long, where nobody can tell whether its launcher lives."""
        return max(self.storm, MOST_STARTS * max(LONGEST_START, self.failure_timeout))


DRIFT = 1e-4
"""Seconds by which two clocks may part within a second; quartz keeps a tenth of it, and adjusting a clock adds some."""


@dataclass(frozen=True)
class ClockOffset:
    """How far the other clock is ahead of ours, give or take the uncertainty."""

    seconds: float
    uncertainty: float


class RemoteClock:
    """Follows another machine's clock.

    The time that a reply carries was read between the sending of its request and its arrival, so each round trip
    bounds the offset: the shortest is the best. What was found long ago is worth less, since clocks drift; and where
    the other clock was set, what contradicts it is forgotten. Ours never jumps: it is a monotonic one.
    """

    def __init__(self) -> None:
        self._best: ClockOffset | None = None
        self._found = 0.0
        self._source = 0

    def add(self, sent: float, remote: float, received: float, source: int = 0) -> None:
        """One round trip. `source` tells one remote clock from a later one in its place, whose time counts alone."""
        if source < self._source:
            return
        offset = ClockOffset(remote - (sent + received) / 2, max(0.0, received - sent) / 2)
        known = self.offset(received)
        if (
            known is None
            or source > self._source
            or offset.uncertainty <= known.uncertainty
            or abs(offset.seconds - known.seconds) > offset.uncertainty + known.uncertainty
        ):
            self._best, self._found, self._source = offset, received, source

    def offset(self, now: float) -> ClockOffset | None:
        """As it is known by now; None before the first reply."""
        if self._best is None:
            return None
        return ClockOffset(self._best.seconds, self._best.uncertainty + max(0.0, now - self._found) * DRIFT)


# --- time, waiting and threads: whoever waits takes a `Runtime`, and reads no clock and starts no thread of its own, so
# that the simulator can have the same code wait in virtual time


class Condition(Protocol):
    """Held by one thread at a time, but for the time in which it waits: a `threading.Condition`, as far as needed."""

    def __enter__(self) -> bool: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until it holds, or for so many seconds; whether it does. Looked at whenever somebody notifies."""
        ...

    def notify_all(self) -> None:
        """Have those who wait look again."""
        ...


class Thread(Protocol):
    """Something that runs beside its caller."""

    def join(self) -> None:
        """Wait until it has ended."""
        ...


class Runtime(Protocol):
    """Given to whoever waits, by the process that it lives in."""

    def now(self) -> float:
        """Seconds that never go back."""
        ...

    def condition(self) -> Condition:
        """A new one, that nobody holds."""
        ...

    def spawn(self, name: str, work: Callable[[], None]) -> Thread:
        """Have something run beside the caller. It does not keep the process from ending."""
        ...


class SystemRuntime:
    """The machine's own clock and threads."""

    now = staticmethod(time.monotonic)
    condition = staticmethod(threading.Condition)

    def spawn(self, name: str, work: Callable[[], None]) -> Thread:
        """A daemon: who fails before it can end its threads must still be able to exit."""
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread


SYSTEM = SystemRuntime()


class Latch:
    """Is set once, for good; whoever waits on it ends its pause then."""

    def __init__(self, runtime: Runtime) -> None:
        self._changed = runtime.condition()
        self.wakes = 0
        self.is_set = False

    def set(self) -> None:
        with self._changed:
            self.is_set = True
            self._changed.notify_all()

    def wake(self) -> None:
        """End the pause of those who wait for it. It is not set by that."""
        with self._changed:
            self.wakes += 1
            self._changed.notify_all()

    def wait(self, seconds: float, since: int | None = None) -> bool:
        """Pause for so many seconds, or until it is set; whether it is. Given how many `wakes` there were, also until
        there is another."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.is_set or (since is not None and self.wakes != since), max(0.0, seconds)
            )
            return self.is_set
