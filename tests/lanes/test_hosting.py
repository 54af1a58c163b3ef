import math
from itertools import chain, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorate.lanes.chunks import host_lanes, host_lanes_by_speed, slowest_seconds


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


seconds_per_lane = st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 7.0]), min_size=1, max_size=6)


@given(st.data())
def test_by_speed_every_worker_hosts_a_lane_and_every_lane_is_hosted_once_in_order(data: st.DataObject) -> None:
    speeds = data.draw(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=16))
    lanes = data.draw(st.integers(len(speeds), 64))
    hosting = host_lanes_by_speed(lanes, speeds)
    assert list(chain.from_iterable(hosting)) == list(range(lanes))
    assert len(hosting) == len(speeds)
    assert all(hosting)
    assert slowest_seconds(hosting, speeds) <= slowest_seconds(host_lanes(lanes, len(speeds)), speeds)


@given(seconds_per_lane, st.integers(0, 5))
def test_by_speed_no_other_sharing_ends_sooner(speeds: list[float], more: int) -> None:
    lanes = len(speeds) + more
    best = min(
        max(count * seconds for count, seconds in zip(counts, speeds, strict=True))
        for counts in product(range(1, more + 2), repeat=len(speeds))
        if sum(counts) == lanes
    )
    assert slowest_seconds(host_lanes_by_speed(lanes, speeds), speeds) == best


@given(st.integers(1, 8), st.integers(0, 24), st.floats(1e-3, 10.0))
def test_by_speed_equal_workers_share_evenly(workers: int, more: int, seconds: float) -> None:
    assert host_lanes_by_speed(workers + more, [seconds] * workers) == host_lanes(workers + more, workers)


def test_by_speed_a_slow_worker_gets_fewer_lanes() -> None:
    assert host_lanes_by_speed(8, [1.0, 4.0, 1.0]) == (range(4), range(4, 5), range(5, 8))


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan])
def test_by_speed_a_lane_takes_time(seconds: float) -> None:
    with pytest.raises(ValueError, match="a lane takes a time above 0"):
        host_lanes_by_speed(4, [1.0, seconds])


def test_by_speed_impossible_hosting_is_refused_too() -> None:
    with pytest.raises(ValueError, match="3 workers cannot host 2 lanes"):
        host_lanes_by_speed(2, [1.0, 1.0, 1.0])
