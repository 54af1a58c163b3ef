"""Workers ask each other which unit comes next, until they know."""

from collections.abc import Sequence

import pytest

from quorate.core.errors import GenerationOver, UnsupportedModelError
from quorate.core.generation import Member
from quorate.strategies.gangs.sharded_model import ASKED_STEPS, DONE, UnitOrder

MEMBERS = [Member(worker, "", range(worker, worker + 1)) for worker in range(2)]
USUAL = ("forward a", "forward b", "sum b", "sum a")


class Other:
    """The other worker: it says the same as this one, unless it is told to say something else."""

    def __init__(self, *, varies: bool = False) -> None:
        self.asked: list[str] = []
        self.says: str | None = None
        self._varies = b"1" if varies else b"0"
        self._is_first = True

    def __call__(self, own: bytes) -> tuple[bytes, ...]:
        if self._is_first:
            self._is_first = False
            return own, self._varies
        self.asked.append(own.decode())
        return own, own if self.says is None else self.says.encode()


def following(other: Other, order: UnitOrder | None = None) -> UnitOrder:
    order = order or UnitOrder()
    order.follow(other, MEMBERS)
    return order


def run(order: UnitOrder, step: int, units: Sequence[str] = USUAL) -> None:
    order.begin(step)
    for unit in units:
        order.enter(unit)
    order.end()


def known(other: Other) -> UnitOrder:
    """All have agreed on an order, and ask no more."""
    order = following(other)
    for step in range(ASKED_STEPS):
        run(order, step + 1)
    assert other.asked == [*USUAL, DONE] * ASKED_STEPS
    other.asked.clear()
    return order


def test_what_is_known_is_not_asked() -> None:
    order = known(other := Other())
    run(order, 3)
    assert other.asked == []


def test_an_evaluation_is_asked_about_and_changes_nothing() -> None:
    order = known(other := Other())
    order.enter("forward a")
    order.end()
    assert other.asked == ["forward a", DONE]
    run(order, 3)
    assert len(other.asked) == 2


@pytest.mark.parametrize(
    "units", [("forward a", "sum a"), USUAL[:3], (*USUAL, "sum a")], ids=["another", "fewer", "more"]
)
def test_who_finds_another_order_leaves_and_from_then_on_all_ask(units: Sequence[str]) -> None:
    order = known(Other())
    with pytest.raises(GenerationOver, match=r"in step 3, .* comes where .* has come in all steps before"):
        run(order, 3, units)
    following(other := Other(), order)
    for step in range(3, 9):
        run(order, step, units)
    assert other.asked == [*units, DONE] * 6


def test_who_has_not_seen_it_asks_as_well() -> None:
    following(other := Other(varies=True), order := UnitOrder())
    for step in range(1, 9):
        run(order, step)
    assert other.asked == [*USUAL, DONE] * 8
    assert order.varies, "and tells those of the next generation"


def test_steps_that_are_not_alike_are_asked_about_for_good() -> None:
    order = following(other := Other())
    for step in range(1, 9):
        run(order, step, USUAL[: 3 + step % 2])
    assert other.asked.count(DONE) == 8


@pytest.mark.parametrize("place", range(len(USUAL) + 1))
def test_a_difference_ends_the_job_and_is_told_of_both(place: int) -> None:
    order = following(other := Other())
    order.begin(1)
    for unit in USUAL[:place]:
        order.enter(unit)
    other.says = "forward z"
    mine = [*USUAL, DONE][place]
    with pytest.raises(UnsupportedModelError, match=f"In step 1 .* worker 0: {mine}; worker 1: forward z"):
        order.end() if mine == DONE else order.enter(mine)


def test_who_is_alone_asks_nobody_and_may_do_as_it_likes() -> None:
    order = UnitOrder()
    order.follow(other := Other(), MEMBERS[:1])
    for step in range(1, 9):
        run(order, step, USUAL[: step % 3])
    assert other.asked == []
