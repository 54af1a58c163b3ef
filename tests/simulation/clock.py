"""Time that passes only when something is due, and processes that live in it."""

import heapq
import itertools
from collections.abc import Callable
from typing import Protocol

Deed = Callable[[], None]


class Clock(Protocol):
    """What a process reads, and has itself woken by."""

    @property
    def now(self) -> float:
        """The time."""
        ...

    def time(self) -> float:
        """The time, for whoever wants a function."""
        ...

    def after(self, seconds: float, deed: Deed) -> None:
        """Have something done when so many of its seconds have passed."""
        ...


class VirtualClock:
    """A queue of deeds, each at its time; the order of two at the same time is the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Deed]] = []
        self._count = itertools.count()

    def time(self) -> float:
        """The time, for whoever wants a function."""
        return self.now

    def after(self, seconds: float, deed: Deed) -> None:
        """Have something done when so many seconds have passed."""
        heapq.heappush(self._queue, (self.now + seconds, next(self._count), deed))

    def advance(self) -> bool:
        """Do what is due next; False when nothing is left to do."""
        if not self._queue:
            return False
        self.now, _, deed = heapq.heappop(self._queue)
        deed()
        return True


class HostClock:
    """The clock of one host: it began at another time than the true one, and runs a little faster or slower."""

    def __init__(self, true: VirtualClock, rate: float = 1.0, offset: float = 0.0) -> None:
        self._true = true
        self._rate = rate
        self._offset = offset

    @property
    def now(self) -> float:
        """The time, as this host has it."""
        return self._offset + self._rate * self._true.now

    def time(self) -> float:
        """The time, for whoever wants a function."""
        return self.now

    def after(self, seconds: float, deed: Deed) -> None:
        """Have something done when so many of its seconds have passed."""
        self._true.after(seconds / self._rate, deed)


class Process:
    """Something that can be stopped, goes on later with what it has missed, and can die.

    `place` is where the network finds it: the place of a worker survives its process.
    """

    def __init__(self, clock: Clock, place: str) -> None:
        self.clock = clock
        self.place = place
        self.is_alive = True
        self._is_stopped = False
        self._held: list[Deed] = []

    def after(self, seconds: float, deed: Deed) -> None:
        """Do something later, if it lives then and is not stopped."""
        self.clock.after(seconds, lambda: self.do(deed))

    def do(self, deed: Deed) -> None:
        """Do something now, or when it goes on again, or never."""
        if self._is_stopped:
            self._held.append(deed)
        elif self.is_alive:
            deed()

    @property
    def is_stopped(self) -> bool:
        """Whether it lives but does nothing."""
        return self._is_stopped

    def stop(self) -> None:
        """As SIGSTOP does."""
        self._is_stopped = True

    def go_on(self) -> None:
        """As SIGCONT does."""
        self._is_stopped = False
        held, self._held = self._held, []
        for deed in held:
            self.do(deed)

    def die(self) -> None:
        """As SIGKILL does, also to one that is stopped."""
        self.is_alive = False
        self._is_stopped = False
        self._held.clear()
