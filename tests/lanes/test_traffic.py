import pytest

from quorate.lanes.chunks import host_lanes
from quorate.replica.footprint import Traffic, ring_traffic


@pytest.mark.parametrize(("lanes", "workers"), [(1, 1), (2, 2), (4, 4), (8, 2), (7, 3), (5, 5)])
@pytest.mark.parametrize("elements", [0, 3, 1000, 1009])
def test_what_one_sends_the_next_receives(lanes: int, workers: int, elements: int) -> None:
    traffic = ring_traffic([(elements, 4), (10, 8)], host_lanes(lanes, workers))
    assert [each.sends for each in traffic] == [each.receives for each in (*traffic[1:], traffic[0])]


def test_with_a_lane_for_each_worker_it_is_what_every_ring_sends() -> None:
    traffic = ring_traffic([(1000, 4)], host_lanes(4, 4))
    assert traffic == (Traffic(2 * 3 * 1000, 2 * 3 * 1000),) * 4  # 2 (N - 1) / N of 4,000 bytes


def test_a_worker_by_itself_sends_nothing() -> None:
    assert ring_traffic([(1000, 4)], host_lanes(8, 1)) == (Traffic(0, 0),)
