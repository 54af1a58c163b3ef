"""The dealer and the clock, in thousands of simulated schedules, and that the referee sees rules that are wrong."""

import re
from typing import Any

import pytest

from quorate.strategies.servers import dealing
from quorate.strategies.servers.dealing import AppliedSet, ClockViolation, Dealer, Unit, check_begun, may_begin
from strategies.servers.dealt_schedules import Play, RuleBroken, Schedule

SOME = 500
MANY = 10_000


def play(seeds: range) -> dict[int | None, int]:
    """The largest gap that was seen with each bound."""
    gaps: dict[int | None, int] = {}
    for seed in seeds:
        schedule = Schedule.draw(seed)
        referee = Play(schedule).run()
        gaps[schedule.staleness] = max(gaps.get(schedule.staleness, 0), referee.largest_gap)
    return gaps


def assert_bounded(gaps: dict[int | None, int]) -> None:
    assert all(gap <= bound for bound, gap in gaps.items() if bound is not None)
    # And the bounds are made use of: a dealer that never runs ahead would keep them all.
    assert all(gap == bound for bound, gap in gaps.items() if bound is not None and bound <= 4)
    assert gaps[None] > 4


def test_every_unit_is_applied_once_and_nobody_runs_further_ahead_than_the_bound() -> None:
    assert_bounded(play(range(SOME)))


@pytest.mark.long
def test_the_same_holds_in_ten_thousand_schedules() -> None:
    assert_bounded(play(range(MANY)))


def one_further(step: int, oldest: int, staleness: int | None) -> bool:
    return may_begin(step, oldest, None if staleness is None else staleness + 1)


def one_less(step: int, oldest: int, staleness: int | None) -> bool:
    return may_begin(step, oldest, None if staleness is None else max(0, staleness - 1))


@pytest.mark.parametrize(
    ("rule", "seen"),
    [(one_further, "steps ahead"), (lambda *_: True, "steps ahead"), (one_less, "a worker waits")],
    ids=["one step further", "no bound", "one step less"],
)
def test_a_wrong_rule_is_seen(monkeypatch: pytest.MonkeyPatch, rule: Any, seen: str) -> None:
    monkeypatch.setattr(dealing, "may_begin", rule)
    monkeypatch.setattr(dealing, "check_begun", lambda *_: None)
    with pytest.raises(RuleBroken, match=seen):
        play(range(SOME))


def test_the_check_of_a_running_job_sees_a_wrong_rule_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dealing, "may_begin", one_further)
    with pytest.raises(ClockViolation, match=re.escape("steps ahead, and at most")):
        play(range(SOME))


def test_blocks_that_do_not_skip_what_they_have_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AppliedSet, "__contains__", lambda *_: False)
    with pytest.raises(RuleBroken, match=r"applied twice|dealt although"):
        play(range(SOME))


@pytest.mark.parametrize(("step", "allowed"), [(5, True), (7, True), (8, False)])
def test_a_unit_may_begin_so_many_steps_ahead(step: int, allowed: bool) -> None:
    assert may_begin(step, 5, 2) is allowed
    assert may_begin(step, 5, None)
    if not allowed:
        with pytest.raises(ClockViolation, match=re.escape("3 steps ahead, and at most 2")):
            check_begun(step, 5, 2)


def dealt(dealer: Dealer, count: int) -> list[tuple[int, int] | None]:
    return [dealer.deal() for _ in range(count)]


def test_units_are_dealt_in_order_to_whoever_asks() -> None:
    dealer = Dealer(AppliedSet(2), 9, None)
    assert dealt(dealer, 4) == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_nothing_is_dealt_beyond_a_boundary_and_it_is_complete_when_all_is_applied() -> None:
    dealer = Dealer(AppliedSet(2), 1, None)
    assert dealt(dealer, 3) == [(1, 0), (1, 1), None]
    dealer.applied.add(Unit(1, 1))
    assert not dealer.is_complete
    dealer.applied.add(Unit(1, 0))
    assert dealer.is_complete


def test_whoever_asks_for_a_boundary_gets_the_furthest_step_that_was_dealt() -> None:
    dealer = Dealer(AppliedSet(2), 9, None)
    dealt(dealer, 3)
    assert dealer.close_at_furthest() == 2
    assert dealt(dealer, 2) == [(2, 1), None]


def test_a_boundary_that_is_asked_for_where_nothing_is_at_work_is_there_at_once() -> None:
    dealer = Dealer(AppliedSet(2, through=4), 9, None)
    assert dealer.close_at_furthest() == 4
    assert dealer.is_complete


def test_a_boundary_may_be_asked_for_a_step_further_on_at_least() -> None:
    dealer = Dealer(AppliedSet(2, through=4), 9, None)
    assert dealer.close_at_furthest(at_least=5) == 5
    assert dealt(dealer, 3) == [(5, 0), (5, 1), None]
    assert dealer.close_at_furthest(at_least=7) == 5, "a boundary only comes nearer"


def test_a_dealer_goes_on_from_what_is_applied() -> None:
    dealer = Dealer(AppliedSet(2, 3, {Unit(4, 1), Unit(6, 0)}), 9, None)
    assert dealt(dealer, 4) == [(4, 0), (5, 0), (5, 1), (6, 1)]
    assert dealer.close_at_furthest() == 6
