"""Where workers stand on the ring when some of their links have failed."""

from itertools import combinations, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorate.coordinator.states import Pair
from quorate.coordinator.weak_links import are_neighbours, pair_of, ring_order

FEW = st.sets(st.integers(0, 9), min_size=1, max_size=6)


@st.composite
def rings(draw: st.DrawFn) -> tuple[set[int], set[Pair]]:
    """Up to six workers, and any of their links."""
    workers = draw(FEW)
    links = list(combinations(sorted(workers), 2))
    return workers, draw(st.sets(st.sampled_from(links))) if links else set()


def is_good(order: tuple[int, ...], bad: set[Pair]) -> bool:
    if len(order) < 2:
        return True
    around = zip(order, (*order[1:], order[0]), strict=True)
    return not any(pair_of(one, other) in bad for one, other in around)


@given(rings())
def test_no_bad_link_joins_neighbours_if_any_order_keeps_them_apart(given_ring: tuple[set[int], set[Pair]]) -> None:
    workers, bad = given_ring
    order = ring_order(workers, bad)
    exists = any(is_good(one, bad) for one in permutations(sorted(workers)))
    assert (order is not None) == exists
    if order is not None:
        assert sorted(order) == sorted(workers)
        assert is_good(order, bad)
        assert not any(are_neighbours(link, order) for link in bad)


@given(FEW)
def test_without_bad_links_workers_stand_in_the_order_of_their_numbers(workers: set[int]) -> None:
    assert ring_order(workers, ()) == tuple(sorted(workers))


@pytest.mark.parametrize("workers", [2, 3])
def test_few_workers_cannot_be_kept_apart(workers: int) -> None:
    for link in combinations(range(workers), 2):
        assert ring_order(range(workers), {link}) is None


def test_four_can() -> None:
    assert ring_order(range(4), {(0, 1)}) == (0, 2, 1, 3)
    # Each has one neighbour too many that it cannot stand beside.
    assert ring_order(range(4), {(0, 1), (1, 2)}) is None


def test_many_workers_are_ordered_at_once() -> None:
    """One of sixty-four that can stand only between two others, and eight that are cut off from eight."""
    lonely = {(one, 63) for one in range(61)}
    apart = {(one, other) for one in range(8) for other in range(8, 16)}
    for bad in (lonely, apart, lonely | apart):
        order = ring_order(range(64), bad)
        assert order is not None
        assert is_good(order, bad)
    assert ring_order(range(64), lonely | {(61, 63)}) is None


def test_neighbours_are_told_also_over_the_seam() -> None:
    assert are_neighbours((0, 3), (0, 1, 2, 3))
    assert are_neighbours((2, 3), (0, 1, 2, 3))
    assert not are_neighbours((0, 2), (0, 1, 2, 3))
    assert not are_neighbours((0, 9), (0, 1))
