"""What is measured of links when a generation begins: round trips, and how many bytes a step sends."""

import time
from collections.abc import Sequence

import pytest
import torch

from collectives import rings, test_shared_memory_reduction
from collectives.test_shared_memory_reduction import plan_of
from memory_link import MemoryLink
from quorate.collectives.reduction import Reduction
from quorate.collectives.ring import Ring
from quorate.collectives.shared_memory import SharedMemoryReduction
from quorate.core.digests import Buffer
from quorate.wire.link import Deadline, Tag

CASES = [(lanes, workers) for lanes in (2, 3, 5, 8) for workers in range(2, lanes + 1)]


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_every_worker_of_a_ring_measures_a_round_trip_and_sums_on(workers: int) -> None:
    values = [torch.full((17,), float(lane)) for lane in range(workers)]

    def work(position: int, ring: Ring) -> tuple[float | None, list[float]]:
        total = torch.empty(17)
        trip = ring.round_trip()
        ring.all_reduce(1, 0, [values[position]], total)
        return trip, total.tolist()

    with rings.memory_rings(workers, workers) as made:
        for trip, total in rings.everywhere(made, work):
            assert trip is not None and 0 < trip < 60
            assert total == [sum(range(workers))] * 17


def test_a_round_trip_lasts_as_long_as_the_links_take(monkeypatch: pytest.MonkeyPatch) -> None:
    way = 0.02
    send = MemoryLink.send

    def delayed(link: MemoryLink, tag: Tag, payload: Buffer, deadline: Deadline) -> None:
        time.sleep(way)
        send(link, tag, payload, deadline)

    monkeypatch.setattr(MemoryLink, "send", delayed)
    with rings.memory_rings(2, 2) as made:
        for trip in rings.everywhere(made, lambda _, ring: ring.round_trip()):
            assert trip is not None and 2 * way <= trip


def test_who_is_alone_has_no_round_trip_and_passes_nothing_on() -> None:
    with rings.memory_rings(4, 1) as (alone,):
        assert alone.round_trip() is None
        assert alone.bytes_passed(1000, 4) == 0


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_in_shared_memory_measure_a_round_trip_and_sum_on(workers: int) -> None:
    values = [torch.full((9,), float(lane)) for lane in range(workers)]
    with test_shared_memory_reduction.reductions(workers, workers, plan_of(9)) as met:
        for trip in test_shared_memory_reduction.everywhere(met, lambda _, one: one.round_trip()):
            assert isinstance(trip, float) and 0 < trip < 60
        assert len(set(test_shared_memory_reduction.sum_buckets(met, values))) == 1


@pytest.mark.parametrize(("lanes", "workers"), CASES)
def test_bytes_passed_on_a_ring_are_those_that_its_links_carry(
    lanes: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried: dict[int, int] = {}
    send = MemoryLink.send

    def counted(link: MemoryLink, tag: Tag, payload: Buffer, deadline: Deadline) -> None:
        carried[id(link)] = carried.get(id(link), 0) + memoryview(payload).nbytes
        send(link, tag, payload, deadline)

    monkeypatch.setattr(MemoryLink, "send", counted)
    elements = 101

    def work(position: int, ring: Ring) -> int:
        hosted = ring._lanes
        ring.all_reduce(1, 0, [torch.ones(elements) for _ in hosted], torch.empty(elements))
        return carried[id(ring._next)]

    with rings.memory_rings(lanes, workers) as made:
        assert rings.everywhere(made, work) == [ring.bytes_passed(elements, 4) for ring in made]


def test_with_one_lane_a_worker_both_ways_pass_the_same_number_of_bytes() -> None:
    def passed(reductions: Sequence[Reduction]) -> list[int]:
        return [one.bytes_passed(1200, 4) for one in reductions]

    with rings.memory_rings(4, 4) as ring, test_shared_memory_reduction.reductions(4, 4, plan_of(1200)) as shared:
        assert all(isinstance(one, SharedMemoryReduction) for one in shared)
        assert passed(ring) == passed(shared) == [2 * 3 * 1200 // 4 * 4] * 4
