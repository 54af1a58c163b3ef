"""Which units of work a block has in it: each of them once, whoever has computed it and however often it was dealt."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Unit(NamedTuple):
    """A unit of work: one lane of one step. Units are dealt in this order."""

    step: int
    lane: int

    def __str__(self) -> str:
        return f"lane {self.lane} of step {self.step}"


@dataclass
class AppliedSet:
    """The units that were applied: all up to the step `through`, and some beyond.

    Small, since units are dealt in order: beyond the oldest gap there is no more than what is at work. `lanes` is how
    many units a step has.
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
        while all(Unit(self.through + 1, lane) in self.beyond for lane in range(self.lanes)):
            self.through += 1
            self.beyond.difference_update(Unit(self.through, lane) for lane in range(self.lanes))

    def missing(self, last: int) -> Iterator[Unit]:
        """The units up to the step `last` that were not applied, in the order in which they are dealt."""
        for step in range(self.through + 1, last + 1):
            for lane in range(self.lanes):
                if Unit(step, lane) not in self.beyond:
                    yield Unit(step, lane)

    def common(self, other: "AppliedSet") -> "AppliedSet":
        """What both have."""
        self._check_lanes(other)
        both = AppliedSet(self.lanes, min(self.through, other.through))
        for unit in sorted(self._units_after(both.through) & other._units_after(both.through)):
            both.add(unit)
        return both

    def union(self, other: "AppliedSet") -> "AppliedSet":
        """What either has."""
        self._check_lanes(other)
        either = AppliedSet(self.lanes, max(self.through, other.through))
        for unit in sorted(self.beyond | other.beyond):
            if unit not in either:
                either.add(unit)
        return either

    def holds(self, other: "AppliedSet") -> bool:
        """Whether all that the other has is in here too."""
        return self.common(other) == other

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

    def _check_lanes(self, other: "AppliedSet") -> None:
        if self.lanes != other.lanes:
            raise ValueError(f"one is of a job with {self.lanes} lanes, the other of one with {other.lanes}")


def applied_everywhere(sets: Iterable[AppliedSet]) -> AppliedSet:
    """What all of these blocks have: whatever else was begun must be dealt again, for those that lack it."""
    first, *rest = sets
    for each in rest:
        first = first.common(each)
    return first.copy()
