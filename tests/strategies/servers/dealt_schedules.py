"""Simulated schedules of units: workers of many speeds that die and come back, blocks that are updated one by one.

The referee knows the rules by itself. It sees every begin, every update of a block and every wait.
"""

import heapq
import random
from dataclasses import dataclass, field

from quorate.strategies.servers.dealing import AppliedSet, Dealer, Unit, applied_everywhere


class RuleBroken(BaseException):
    """Something that must not happen in any schedule."""


@dataclass(frozen=True)
class Schedule:
    """What is drawn for a seed."""

    seed: int
    workers: int
    lanes: int
    steps: int
    blocks: int
    staleness: int | None

    @classmethod
    def draw(cls, seed: int) -> "Schedule":
        drawn = random.Random(f"schedule {seed}")
        staleness = drawn.choice([None, 0, 1, 2, 3, 4, 7])
        return cls(seed, drawn.randint(1, 6), drawn.randint(1, 6), drawn.randint(1, 12), drawn.randint(1, 4), staleness)


@dataclass
class Referee:
    """Compares what happens with the rules: a step apart from the code that keeps them."""

    schedule: Schedule
    counts: list[dict[Unit, int]] = field(init=False)
    known: set[Unit] = field(default_factory=set)
    """What somebody who lives was told to be applied: blocks may have more, of workers that died in their push."""
    largest_gap: int = 0

    def __post_init__(self) -> None:
        self.counts = [{} for _ in range(self.schedule.blocks)]

    def oldest(self, known: bool = False) -> int:
        """The first step with a unit that some block lacks, or that nobody knows to be applied."""
        step = 1
        while all(
            (Unit(step, lane) in self.known) if known else self.is_applied(Unit(step, lane))
            for lane in range(self.schedule.lanes)
        ):
            step += 1
        return step

    def is_applied(self, unit: Unit) -> bool:
        return all(unit in count for count in self.counts)

    def look(self) -> None:
        """Somebody has gathered what all blocks have."""
        self.known = {unit for unit in self.counts[0] if self.is_applied(unit)}

    def begins(self, unit: Unit, boundary: int, at_work: set[Unit]) -> None:
        if unit.step > boundary:
            raise RuleBroken(f"{unit} is beyond the boundary at {boundary}")
        if unit in at_work or unit in self.known:
            raise RuleBroken(f"{unit} is dealt although it is at work or applied")
        gap = unit.step - self.oldest()
        self.largest_gap = max(self.largest_gap, gap)
        if self.schedule.staleness is not None and gap > self.schedule.staleness:
            raise RuleBroken(f"{unit} is begun {gap} steps ahead, at most {self.schedule.staleness} are allowed")

    def waits(self, boundary: int, at_work: set[Unit]) -> None:
        """A worker gets nothing: then there is nothing that it could do."""
        bound = self.schedule.staleness
        ahead = boundary if bound is None else min(boundary, self.oldest(known=True) + bound)
        for step in range(1, ahead + 1):
            for lane in range(self.schedule.lanes):
                unit = Unit(step, lane)
                if unit not in at_work and unit not in self.known:
                    raise RuleBroken(f"a worker waits, and {unit} could be done")

    def applies(self, block: int, unit: Unit) -> None:
        self.counts[block][unit] = self.counts[block].get(unit, 0) + 1
        if self.counts[block][unit] > 1:
            raise RuleBroken(f"{unit} is applied twice on block {block}")

    def reaches(self, boundary: int) -> None:
        expected = {Unit(step, lane) for step in range(1, boundary + 1) for lane in range(self.schedule.lanes)}
        for block, count in enumerate(self.counts):
            if count.keys() != expected:
                raise RuleBroken(f"block {block} is at a boundary with {len(count)} units instead of {len(expected)}")


class Play:
    """One schedule, played to its end; `referee` has seen it."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.referee = Referee(schedule)
        self._draw = random.Random(schedule.seed)
        self._blocks = [AppliedSet(schedule.lanes) for _ in range(schedule.blocks)]
        self._seconds = {worker: self._draw.uniform(0.5, 2.0) for worker in range(schedule.workers)}
        self._seconds[0] *= 4
        self._now = 0.0
        self._number = 0
        self._done: list[tuple[float, int, int, Unit]] = []

    def run(self) -> Referee:
        last = 0
        while last < self.schedule.steps:
            boundary = self._draw.randint(last + 1, self.schedule.steps)
            last = self._segment(boundary)
        return self.referee

    def _segment(self, boundary: int) -> int:
        """Play up to a boundary; at random somebody asks for one earlier, and the generation ends before it."""
        dealer = self._dealer(boundary)
        at_work: dict[int, Unit] = {}
        free = list(range(self.schedule.workers))
        self._done.clear()
        while True:
            self._draw.shuffle(free)
            free = [worker for worker in free if not self._begin(dealer, worker, at_work)]
            if dealer.is_complete:
                if any(unit.step > dealer.boundary for unit in at_work.values()):
                    raise RuleBroken(f"something beyond the boundary at {dealer.boundary} is at work")
                self.referee.reaches(dealer.boundary)
                return dealer.boundary
            chance = self._draw.random()
            if chance < 0.02:
                dealer.close_at_furthest()
            elif chance < 0.04:
                # The generation ends in the middle: blocks keep what they have, another dealer goes on.
                dealer = self._dealer(dealer.boundary)
                at_work.clear()
                self._done.clear()
                free = list(range(self.schedule.workers))
                continue
            if not self._done:
                raise RuleBroken("everybody waits, and the boundary is not reached")
            self._now, _, worker, unit = heapq.heappop(self._done)
            del at_work[worker]
            free.append(worker)
            if not self._push(dealer, unit):
                dealer = self._dealer(dealer.boundary)
                at_work.clear()
                self._done.clear()
                free = list(range(self.schedule.workers))

    def _push(self, dealer: Dealer, unit: Unit) -> bool:
        """Update the blocks. A worker that dies in the middle of it has reached some of them and not the others: the
        generation ends."""
        is_killed = self._draw.random() < 0.05
        blocks = range(len(self._blocks))
        reached = self._draw.sample(blocks, self._draw.randrange(len(self._blocks))) if is_killed else blocks
        for block in reached:
            if unit not in self._blocks[block]:
                self._blocks[block].add(unit)
                self.referee.applies(block, unit)
        if not is_killed:
            dealer.applied.add(unit)
            self.referee.known.add(unit)
        return not is_killed

    def _dealer(self, boundary: int) -> Dealer:
        self.referee.look()
        return Dealer(applied_everywhere(self._blocks), boundary, self.schedule.staleness)

    def _begin(self, dealer: Dealer, worker: int, at_work: dict[int, Unit]) -> bool:
        unit = dealer.deal()
        if unit is None:
            self.referee.waits(dealer.boundary, set(at_work.values()))
            return False
        self.referee.begins(unit, dealer.boundary, set(at_work.values()))
        at_work[worker] = unit
        self._number += 1
        done = self._now + self._seconds[worker] * self._draw.uniform(0.8, 1.2)
        heapq.heappush(self._done, (done, self._number, worker, unit))
        return True
