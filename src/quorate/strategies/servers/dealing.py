"""Units of work: which of them are applied, and who computes the next. Pure: without time, threads or links."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

from quorate.core.errors import JobError


class Unit(NamedTuple):
    """A lane of a step. Units are dealt in this order."""

    step: int
    lane: int

    def __str__(self) -> str:
        return f"lane {self.lane} of step {self.step}"


@dataclass
class AppliedSet:
    """The units that were applied: all up to the step `through`, and some beyond. `lanes` is how many a step has.

    Small, since units are dealt in order: beyond the oldest gap there is no more than what is at work.
    """

    lanes: int
    through: int = 0
    beyond: set[Unit] = field(default_factory=set)

    def __contains__(self, unit: Unit) -> bool:
        return unit.step <= self.through or unit in self.beyond

    def __len__(self) -> int:
        return self.lanes * self.through + len(self.beyond)

    @property
    def oldest_unapplied(self) -> int:
        """The first step of which a unit is missing."""
        return self.through + 1

    @property
    def furthest(self) -> int:
        """The latest step of which a unit is in it."""
        return max((unit.step for unit in self.beyond), default=self.through)

    def add(self, unit: Unit) -> None:
        """Note a unit as applied. Twice is a fault: its gradient would count twice."""
        if not 0 <= unit.lane < self.lanes:
            raise ValueError(f"a step has the lanes 0 to {self.lanes - 1}, not {unit.lane}")
        if unit in self:
            raise ValueError(f"{unit} was applied before")
        self.beyond.add(unit)
        while (coming := {Unit(self.through + 1, lane) for lane in range(self.lanes)}) <= self.beyond:
            self.through += 1
            self.beyond -= coming

    def common(self, other: "AppliedSet") -> "AppliedSet":
        """What both have."""
        if self.lanes != other.lanes:
            raise ValueError(f"one is of a job with {self.lanes} lanes, the other of one with {other.lanes}")
        through = min(self.through, other.through)
        return AppliedSet(self.lanes, through, self._units_after(through) & other._units_after(through))

    def copy(self) -> "AppliedSet":
        return AppliedSet(self.lanes, self.through, set(self.beyond))

    def to_json(self) -> dict[str, Any]:
        return {"lanes": self.lanes, "through": self.through, "beyond": [list(unit) for unit in sorted(self.beyond)]}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> "AppliedSet":
        return cls(told["lanes"], told["through"], {Unit(step, lane) for step, lane in told["beyond"]})

    def _units_after(self, through: int) -> set[Unit]:
        steps = range(through + 1, self.through + 1)
        return self.beyond | {Unit(step, lane) for step in steps for lane in range(self.lanes)}


def applied_everywhere(sets: Iterable[AppliedSet]) -> AppliedSet:
    """What all of these blocks have: whatever else was begun must be dealt again, for those that lack it."""
    return reduce(AppliedSet.common, sets).copy()


@dataclass
class UnitRecord:
    """Which units are in what a server holds, since the last boundary; it outlives generations, as the state does.

    `blocks` has the applied set of each block that this server holds. `base` is that of all else: the buffers, and the
    notes of the units, of which each server has all. So whoever is left of several servers can go on as the hub.
    """

    lanes: int
    base: AppliedSet = field(init=False)
    blocks: dict[int, AppliedSet] = field(default_factory=dict)
    notes: dict[Unit, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reset(0, ())

    def reset(self, step: int, blocks: Iterable[int]) -> None:
        """The state is that of a boundary: all units up to a step are in it, and nothing else is."""
        self.base = AppliedSet(self.lanes, step)
        self.blocks = {block: AppliedSet(self.lanes, step) for block in blocks}
        self.notes = {}

    def sets(self) -> list[AppliedSet]:
        return [self.base, *self.blocks.values()]

    def versions(self, step: int) -> dict[int, int]:
        """How many units are in each block; a block that lacks some of the steps up to this one is of no use."""
        return {block: len(applied) for block, applied in self.blocks.items() if applied.through >= step}

    def keep_only(self, blocks: Collection[int]) -> None:
        self.blocks = {block: applied for block, applied in self.blocks.items() if block in blocks}

    def of_base(self) -> dict[str, Any]:
        """The base and the notes, for a server that lacks some of them."""
        notes = [[list(unit), note] for unit, note in sorted(self.notes.items())]
        return {"applied": self.base.to_json(), "notes": notes}

    def take_base(self, told: dict[str, Any]) -> None:
        self.base = AppliedSet.from_json(told["applied"])
        self.notes = {Unit(*unit): note for unit, note in told["notes"]}


class ClockViolation(JobError):  # noqa: N818 (a happening, not a mistake)
    """A unit was begun that the rule does not allow: a fault of Quorate."""


def may_begin(step: int, oldest_unapplied: int, staleness: int | None) -> bool:
    """Whether a unit of `step` may be begun now: at most `staleness` steps ahead of the oldest unapplied one.

    Without a bound (the asynchronous mode) only the next boundary holds it back, and that is the dealer's business.
    """
    return staleness is None or step - oldest_unapplied <= staleness


def check_begun(step: int, oldest_unapplied: int, staleness: int | None) -> None:
    """Raise if a unit of `step` was begun too early. Apart from the rule: a mistake there must not excuse itself."""
    if staleness is not None and step > oldest_unapplied + staleness:
        raise ClockViolation(
            f"a unit of step {step} was begun while step {oldest_unapplied} was not applied: {step - oldest_unapplied} "
            f"steps ahead, and at most {staleness} are allowed (strategy.staleness). This is a fault of Quorate."
        )


class Dealer:
    """Deals the units after what is `applied`, in order, up to and including the step `boundary`.

    At the boundary everything up to it is applied and nothing beyond is begun: a consistent cut, at which the state can
    be evaluated and saved. `staleness` bounds how far ahead a unit is begun; None is the asynchronous mode. `begun` is
    the latest step of which any block has a unit already, though perhaps not all: no boundary can be before that. Each
    unit is dealt once: where a worker dies, its generation ends, and the next dealer deals what is missing.
    """

    def __init__(self, applied: AppliedSet, boundary: int, staleness: int | None, begun: int = 0) -> None:
        self.applied = applied.copy()
        self.boundary = boundary
        self._staleness = staleness
        self._next = Unit(self.applied.oldest_unapplied, 0)
        self._furthest = max(begun, self.applied.furthest)
        self.largest_gap = 0
        """How many steps ahead of the oldest unapplied one a unit was begun, at most."""

    @property
    def is_complete(self) -> bool:
        """Whether everything up to the boundary is applied."""
        return self.applied.through >= self.boundary

    def deal(self) -> Unit | None:
        """The next unit for a worker that is free; None where it has to wait until others are done."""
        while self._next in self.applied:
            self._next = self._after(self._next)
        unit, oldest = self._next, self.applied.oldest_unapplied
        if unit.step > self.boundary or not may_begin(unit.step, oldest, self._staleness):
            return None
        check_begun(unit.step, oldest, self._staleness)
        self.largest_gap = max(self.largest_gap, unit.step - oldest)
        self._next = self._after(unit)
        self._furthest = max(self._furthest, unit.step)
        return unit

    def close_at_furthest(self, at_least: int = 0) -> int:
        """Somebody asks for a boundary: the furthest step that was dealt becomes one, and the boundary is told.

        No further: whoever asks shall not wait for work that nobody has begun. But not before the step `at_least`: a
        job that is asked for boundaries all the time comes forward nevertheless.
        """
        self.boundary = min(self.boundary, max(self._furthest, self.applied.through, at_least))
        return self.boundary

    def _after(self, unit: Unit) -> Unit:
        last = unit.lane == self.applied.lanes - 1
        return Unit(unit.step + 1, 0) if last else Unit(unit.step, unit.lane + 1)
