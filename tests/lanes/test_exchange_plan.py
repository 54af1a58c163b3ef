from collections import Counter
from collections.abc import Sequence

import pytest

from quorate.lanes import chunks
from quorate.lanes.chunks import Visit, host_lanes, plan_exchange, summation_order

EVERY_CASE = [(lanes, workers) for lanes in range(1, 17) for workers in range(1, lanes + 1)]


def plan(lanes: int, workers: int) -> tuple[tuple[Visit, ...], ...]:
    return plan_exchange(host_lanes(lanes, workers))


def hops_to_sum(visits_of: Sequence[Sequence[Visit]]) -> list[int]:
    """For each chunk, how often its partial sum is sent before it is finished."""
    unfinished = Counter(visit.chunk for at in visits_of for visit in at if visit.sends and not visit.finished)
    return [unfinished[chunk] for chunk in sorted({visit.chunk for at in visits_of for visit in at})]


def chunks_sent(visits_of: Sequence[Sequence[Visit]]) -> list[int]:
    """For each ring position, how many chunks it sends, partial and finished."""
    return [sum(visit.sends for visit in at) for at in visits_of]


def simulate(hosting: Sequence[range]) -> list[list[tuple[int, ...]]]:
    """Carry a plan out over unlimited first-in-first-out links; for each position, the lanes summed in each chunk."""
    visits = plan_exchange(hosting)
    workers = len(hosting)
    queues: list[list[tuple[int, int, tuple[int, ...]]]] = [[] for _ in hosting]
    held: list[dict[int, tuple[int, ...]]] = [{} for _ in hosting]
    done = [0] * workers
    progress = True
    while progress:
        progress = False
        for position in range(workers):
            while done[position] < len(visits[position]):
                visit = visits[position][done[position]]
                summed: tuple[int, ...] = ()
                if visit.receives:
                    if not queues[position]:
                        break
                    chunk, round_, summed = queues[position].pop(0)
                    assert (chunk, round_) == (visit.chunk, visit.round), "a link carries frames in one order"
                assert all(lane in hosting[position] for lane in visit.adds)
                held[position][visit.chunk] = summed + visit.adds
                if visit.sends:
                    frame = (visit.chunk, visit.round + 1, summed + visit.adds)
                    queues[(position + 1) % workers].append(frame)
                done[position] += 1
                progress = True
    assert done == [len(at) for at in visits], "the exchange got stuck"
    assert not any(queues), "a frame was sent that nobody receives"
    chunks = sum(len(hosted) for hosted in hosting)
    return [[at[chunk] for chunk in range(chunks)] for at in held]


def test_the_order_begins_after_the_chunks_own_lane_and_ends_with_it() -> None:
    assert summation_order(0, 4) == (1, 2, 3, 0)
    assert summation_order(2, 4) == (3, 0, 1, 2)
    assert summation_order(0, 1) == (0,)


@pytest.mark.parametrize(("lanes", "workers"), EVERY_CASE)
def test_every_chunk_meets_every_lane_once_in_order_and_reaches_every_worker(lanes: int, workers: int) -> None:
    expected = [tuple((chunk + 1 + i) % lanes for i in range(lanes)) for chunk in range(lanes)]
    assert simulate(host_lanes(lanes, workers)) == [expected] * workers


@pytest.mark.parametrize(("lanes", "workers"), EVERY_CASE)
def test_a_sum_takes_one_hop_less_than_workers_or_as_many(lanes: int, workers: int) -> None:
    hosting = host_lanes(lanes, workers)
    firsts = {hosted.start for hosted in hosting}
    for chunk, hops in enumerate(hops_to_sum(plan_exchange(hosting))):
        begins_at_a_first_lane = (chunk + 1) % lanes in firsts
        assert hops == (workers - 1 if begins_at_a_first_lane or workers == 1 else workers)


@pytest.mark.parametrize(
    ("lanes", "workers", "ratio"),
    [(2, 2, 1.0), (8, 8, 1.0), (16, 16, 1.0), (3, 2, 1.33), (4, 2, 1.25), (8, 2, 1.38), (8, 3, 1.22)],
)
def test_traffic_of_the_busiest_worker_against_the_textbook(lanes: int, workers: int, ratio: float) -> None:
    assert traffic_ratio(lanes, workers) == pytest.approx(ratio, abs=0.005)


@pytest.mark.parametrize(("lanes", "workers"), [case for case in EVERY_CASE if case[1] > 1])
def test_traffic_stays_below_one_and_a_half_times_the_textbook(lanes: int, workers: int) -> None:
    assert 1.0 <= traffic_ratio(lanes, workers) < 1.5


def traffic_ratio(lanes: int, workers: int) -> float:
    return max(chunks_sent(plan(lanes, workers))) / lanes / (2 * (workers - 1) / workers)


def test_one_worker_sends_nothing() -> None:
    assert chunks_sent(plan(8, 1)) == [0]
    assert hops_to_sum(plan(8, 1)) == [0] * 8


def test_uneven_hosting_after_a_loss_keeps_the_order() -> None:
    assert simulate([range(1), range(1, 6), range(6, 8)])[2][5] == (6, 7, 0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("workers", range(1, 7))
def test_the_order_of_additions_is_the_order_of_summation(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "summation_order", lambda chunk, lanes: tuple(reversed(range(lanes))))
    assert simulate(host_lanes(6, workers)) == [[(5, 4, 3, 2, 1, 0)] * 6] * workers
