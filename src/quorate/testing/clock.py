"""Time that passes only when something is due, and processes that live in it."""

import heapq
import itertools
from collections.abc import Callable

Deed = Callable[[], None]


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


class Process:
    """Something that can be stopped, goes on later with what it has missed, and can die.

    `place` is where the network finds it: the place of a worker survives its process.
    """

    def __init__(self, clock: VirtualClock, place: str) -> None:
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
