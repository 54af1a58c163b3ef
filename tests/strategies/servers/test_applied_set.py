"""Applied sets are what plain sets of units are, and compact."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as some

from quorate.strategies.servers.dealing import AppliedSet, Unit, applied_everywhere

LANES = 3
units = some.sets(some.builds(Unit, some.integers(1, 5), some.integers(0, LANES - 1)))


def made_of(applied: set[Unit]) -> AppliedSet:
    made = AppliedSet(LANES)
    for unit in sorted(applied, key=lambda unit: (unit.lane, -unit.step)):
        made.add(unit)
    return made


@given(units, units)
def test_they_are_the_sets_of_their_units(left: set[Unit], right: set[Unit]) -> None:
    all_units = [Unit(step, lane) for step in range(1, 6) for lane in range(LANES)]
    first, second = made_of(left), made_of(right)
    assert len(first) == len(left)
    assert [unit for unit in all_units if unit in first] == sorted(left)
    assert first.common(second) == made_of(left & right) == applied_everywhere([first, second])
    assert AppliedSet.from_json(json.loads(json.dumps(first.to_json()))) == first


@given(units)
def test_only_what_is_beyond_the_oldest_gap_is_listed(applied: set[Unit]) -> None:
    made = made_of(applied)
    assert any(Unit(made.oldest_unapplied, lane) not in applied for lane in range(LANES))
    assert all(unit.step > made.through for unit in made.beyond)


def test_a_unit_counts_once() -> None:
    applied = AppliedSet(2, through=3)
    with pytest.raises(ValueError, match="lane 1 of step 3 was applied before"):
        applied.add(Unit(3, 1))
    applied.add(Unit(5, 0))
    with pytest.raises(ValueError, match="lane 0 of step 5 was applied before"):
        applied.add(Unit(5, 0))


def test_a_copy_is_its_own() -> None:
    applied = AppliedSet(2)
    applied.copy().add(Unit(1, 0))
    assert len(applied) == 0


def test_sets_of_other_jobs_are_not_compared() -> None:
    with pytest.raises(ValueError, match="2 lanes, the other of one with 3"):
        AppliedSet(2).common(AppliedSet(3))
    with pytest.raises(ValueError, match="lanes 0 to 1, not 2"):
        AppliedSet(2).add(Unit(1, 2))
