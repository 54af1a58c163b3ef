"""The hub of a segment: deals units to the workers, notes what is applied, and tells each step that is complete."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping

from quorate.strategies.servers.units.applied import AppliedSet, Unit
from quorate.strategies.servers.units.dealer import Dealer

LOOK = 0.05
"""Seconds between two looks at whether a segment that somebody waits in is over."""


class SegmentOver(Exception):  # noqa: N818 (a happening, not a mistake)
    """The segment has failed elsewhere on this server; whoever waits stops waiting."""


class Hub:
    """Turns the dealer for the threads that serve the workers, each of which waits here until its worker has work.

    `complete(step)` is called once for each step, in order, when all units of it are applied on every block. `late`
    counts how many updates came between a pull and its push. `begun` is as for the dealer.
    """

    def __init__(
        self, applied: AppliedSet, boundary: int, staleness: int | None, complete: Callable[[int], None], begun: int = 0
    ) -> None:
        self._dealer = Dealer(applied, boundary, staleness, begun)
        self._complete = complete
        self._told = self._began = applied.through
        self._changed = threading.Condition()
        self._is_over = False
        self.late: Counter[int] = Counter()

    @property
    def boundary(self) -> int:
        return self._dealer.boundary

    @property
    def largest_gap(self) -> int:
        return self._dealer.largest_gap

    @property
    def oldest_unapplied(self) -> int:
        return self._dealer.applied.oldest_unapplied

    def start(self, completed: int) -> None:
        """Tell the steps after `completed` that were applied before the segment began: another hub may not have."""
        with self._changed:
            self._told = self._began = completed
            self._tell_steps()

    def next(self, worker: int, done: Unit | None, late: int) -> Unit | None:
        """The next unit of a worker, which has done one before; None at the boundary. Waits until there is one."""
        with self._changed:
            if done is not None:
                self.late[late] += 1
                if self._dealer.note_applied(done):
                    self._tell_steps()
                    self._changed.notify_all()
            while not self._is_over:
                unit = self._dealer.deal(worker)
                if unit is not None or self._dealer.is_complete:
                    return unit
                self._changed.wait(LOOK)
        raise SegmentOver

    def ask_for_boundary(self) -> None:
        """Somebody asks for something that can only be done at a boundary. Each segment has a step at least."""
        with self._changed:
            self._dealer.close_at_furthest(self._began + 1)
            self._changed.notify_all()

    def end(self) -> None:
        """Let nobody wait any longer."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _tell_steps(self) -> None:
        while self._told < self._dealer.applied.through:
            self._told += 1
            self._complete(self._told)


def histogram(late: Mapping[int, int]) -> dict[str, int]:
    """How often how many updates came in between, for an event."""
    return {str(updates): count for updates, count in sorted(late.items())}
