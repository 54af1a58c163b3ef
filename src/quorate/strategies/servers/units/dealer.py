"""Deals units of work to whoever is free, in order, as far ahead as the clock allows and never beyond a boundary.

A state machine without time, threads or links: the hub of the servers turns it, and the simulator does.
"""

import heapq

from quorate.strategies.servers.units.applied import AppliedSet, Unit
from quorate.strategies.servers.units.clock import check_begun, may_begin


class Dealer:
    """Deals the units after what is `applied` up to and including the step `boundary`.

    At the boundary everything up to it is applied and nothing beyond is begun: a consistent cut, at which the state can
    be evaluated and saved. `staleness` bounds how far ahead a unit is begun; None is the asynchronous mode. `begun` is
    the latest step of which any block has a unit already, though perhaps not all: no boundary can be before that.
    """

    def __init__(self, applied: AppliedSet, boundary: int, staleness: int | None, begun: int = 0) -> None:
        self.applied = applied.copy()
        self.boundary = boundary
        self._staleness = staleness
        # Those that were at work when an earlier dealer ended are dealt as if for the first time.
        self._next = Unit(self.applied.oldest_unapplied, 0)
        self._returned: list[Unit] = []
        self._dealt: dict[Unit, int] = {}
        self._furthest = max(begun, self.applied.furthest)
        self.largest_gap = 0
        """How many steps ahead of the oldest unapplied one a unit was begun, at most."""

    @property
    def is_complete(self) -> bool:
        """Whether everything up to the boundary is applied. What may be at work then is only a repetition."""
        return self.applied.through >= self.boundary

    @property
    def furthest(self) -> int:
        """The latest step of which anything was dealt or applied."""
        return self._furthest

    def deal(self, worker: int) -> Unit | None:
        """The next unit for a worker that is free; None where it has to wait until others are done."""
        unit = self._peek()
        if unit is None or not may_begin(unit.step, self.applied.oldest_unapplied, self._staleness):
            return None
        gap = unit.step - self.applied.oldest_unapplied
        check_begun(unit.step, self.applied.oldest_unapplied, self._staleness)
        self.largest_gap = max(self.largest_gap, gap)
        if self._returned:
            heapq.heappop(self._returned)
        else:
            self._next = self._after(unit)
        self._dealt[unit] = worker
        self._furthest = max(self._furthest, unit.step)
        return unit

    def note_applied(self, unit: Unit) -> bool:
        """A unit is applied on every block. Whether that was news: one that was taken back may come in twice."""
        self._dealt.pop(unit, None)
        if unit in self.applied:
            return False
        if unit in self._returned:
            # Its worker was given up too early: it has come in before it was dealt again.
            self._returned.remove(unit)
            heapq.heapify(self._returned)
        self.applied.add(unit)
        return True

    def take_back(self, worker: int) -> tuple[Unit, ...]:
        """A worker is gone: what it had is dealt again, before anything else."""
        lost = tuple(sorted(unit for unit, holder in self._dealt.items() if holder == worker))
        for unit in lost:
            del self._dealt[unit]
            heapq.heappush(self._returned, unit)
        return lost

    def held_by(self, worker: int) -> tuple[Unit, ...]:
        """What a worker has been dealt and is not applied yet."""
        return tuple(sorted(unit for unit, holder in self._dealt.items() if holder == worker))

    def close_at_furthest(self, at_least: int = 0) -> int:
        """Somebody asks for a boundary: the furthest step that was dealt becomes one, and the boundary is told.

        No further: whoever asks shall not wait for work that nobody has begun. But not before the step `at_least`: a
        job that is asked for boundaries all the time comes forward nevertheless.
        """
        self.boundary = min(self.boundary, max(self._furthest, self.applied.through, at_least))
        return self.boundary

    def _peek(self) -> Unit | None:
        if self._returned:
            return self._returned[0]
        unit = self._next
        while unit in self.applied:
            unit = self._after(unit)
        self._next = unit
        return unit if unit.step <= self.boundary else None

    def _after(self, unit: Unit) -> Unit:
        last = unit.lane == self.applied.lanes - 1
        return Unit(unit.step + 1, 0) if last else Unit(unit.step, unit.lane + 1)
