from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorate.lanes.hosting import host_lanes


@given(st.data())
def test_every_lane_is_hosted_once_in_order_and_shares_are_even(data: st.DataObject) -> None:
    lanes = data.draw(st.integers(1, 64))
    workers = data.draw(st.integers(1, lanes))
    hosting = host_lanes(lanes, workers)
    sizes = [len(hosted) for hosted in hosting]
    assert list(chain.from_iterable(hosting)) == list(range(lanes))
    assert len(hosting) == workers
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_earlier_workers_get_the_larger_shares() -> None:
    assert host_lanes(8, 3) == (range(3), range(3, 6), range(6, 8))


@pytest.mark.parametrize(("lanes", "workers"), [(4, 0), (4, 5), (0, 0), (4, -1)])
def test_impossible_hosting_is_refused_with_both_numbers(lanes: int, workers: int) -> None:
    with pytest.raises(ValueError, match=f"{workers} workers cannot host {lanes} lanes"):
        host_lanes(lanes, workers)
