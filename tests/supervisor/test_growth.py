"""How many workers a job comes to have, by what is measured of it."""

import itertools
from collections.abc import Callable, Sequence
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorate.coordinator.client import SupervisorClient
from quorate.observe.events import GenerationFormed, HostedLanes, Resized, StepCompleted
from quorate.spec.options import GrowSpec
from quorate.supervisor.growth import WARMING, Growth, decide, numbers_of_use
from quorate.wire.proto import coordinator_pb2 as pb

NOISE = 0.01


def usl(contention: float, crosstalk: float) -> Callable[[int], float]:
    """Speed by number of workers, as the universal scalability law has it; 100 samples/s for one."""
    return lambda n: 100.0 * n / (1 + contention * (n - 1) + crosstalk * n * (n - 1))


curves = st.builds(usl, st.floats(0, 0.5), st.floats(0, 0.05))
noise = st.lists(st.floats(1 - NOISE, 1 + NOISE), min_size=64, max_size=64)


def followed(
    curve: Callable[[int], float], numbers_to_try: Sequence[int], efficiency: float, factors: list[float]
) -> list[int]:
    """The numbers of workers that a job has one after the other, until nothing changes any more."""
    rates: dict[int, float] = {}
    numbers = [numbers_to_try[0]]
    for _ in range(200):
        workers = numbers[-1]
        rates.setdefault(workers, curve(workers) * factors[workers])
        verdict = decide(rates, workers, numbers_to_try, efficiency)
        assert verdict.reason
        if verdict.workers == workers:
            return numbers
        numbers.append(verdict.workers)
    raise AssertionError(f"it never settles: {numbers}")


@given(curve=curves, least=st.integers(1, 8), more=st.integers(0, 40), efficiency=st.floats(0.1, 1), factors=noise)
def test_a_job_settles_within_its_limits_and_changes_its_mind_once_at_most(
    curve: Callable[[int], float], least: int, more: int, efficiency: float, factors: list[float]
) -> None:
    numbers = followed(curve, range(least, least + more + 1), efficiency, factors)
    assert all(least <= number <= least + more for number in numbers)
    steps = [after - before for before, after in itertools.pairwise(numbers)]
    assert all(step == 1 for step in steps[:-1])
    assert steps[-1:] in ([], [1], [-1])


@given(curve=curves, least=st.integers(1, 4), efficiency=st.floats(0.2, 0.95), factors=noise)
def test_it_ends_with_the_most_workers_that_are_worth_it(
    curve: Callable[[int], float], least: int, efficiency: float, factors: list[float]
) -> None:
    most = 40
    end = followed(curve, range(least, most + 1), efficiency, factors)[-1]

    def each(workers: int) -> float:
        return (curve(workers) / workers) / (curve(least) / least)

    chance = (1 + NOISE) / (1 - NOISE)
    assert end == least or each(end) * chance >= efficiency
    # One more is not efficient, or makes the job no faster.
    assert end == most or each(end + 1) <= efficiency * chance or curve(end + 1) <= curve(end) * chance


@pytest.mark.parametrize(
    ("lanes", "least", "most", "tried"),
    [(8, 1, 8, [1, 2, 3, 4, 8]), (8, 5, 8, [5, 8]), (8, 1, 7, [1, 2, 3, 4]), (3, 1, 3, [1, 2, 3]), (1, 1, 1, [1])],
)
def test_numbers_that_leave_somebody_as_many_lanes_are_not_tried(
    lanes: int, least: int, most: int, tried: list[int]
) -> None:
    """Where the rest is free, each of them is worth it: none is in the way of the next."""
    numbers = numbers_of_use(lanes, least, most)
    assert followed(lambda n: 100.0 / -(-lanes // n), numbers, 0.6, [1.0] * 64) == list(numbers) == tried


@pytest.mark.parametrize(
    ("rates", "workers", "to", "words"),
    [
        ({1: 100.0}, 1, 2, "one more is tried: 1 worker computes 100 samples/s"),
        ({1: 100.0, 2: 180.0}, 2, 3, "one more is tried: 2 workers compute 180 samples/s"),
        ({1: 100.0, 2: 110.0}, 2, 1, "each 55% of what one did with 1, less than engine.grow.efficiency (0.6)"),
        ({1: 100.0, 2: 110.0}, 1, 1, "1 worker from here on: 2 workers compute 110 samples/s, each 55%"),
        ({1: 100.0, 2: 90.0}, 2, 1, "which is slower than with 1 (100 samples/s)"),
        ({1: 100.0, 2: 200.0, 3: 300.0, 4: 400.0}, 4, 4, "as many as are of use: 4 workers compute 400 samples/s"),
        ({1: 100.0, 4: 200.0}, 4, 1, "each 50% of what one did with 1"),
        ({1: 100.0}, 2, 2, "not measured yet"),
        ({}, 9, 4, "there are to be 1 to 4 workers"),
    ],
    ids=str,
)
def test_every_verdict_says_why(rates: dict[int, float], workers: int, to: int, words: str) -> None:
    verdict = decide(rates, workers, range(1, 5), 0.6)
    assert verdict.workers == to
    assert words in verdict.reason


def formed(workers: int) -> GenerationFormed:
    members = tuple(HostedLanes(worker, "", (worker,)) for worker in range(workers))
    return GenerationFormed(generation="1.1", lanes=8, members=members)


def measured(growth: Growth, workers: int, speed: float, steps: int) -> None:
    growth.handle(formed(workers))
    for step in range(steps):
        # What a generation's first steps take says nothing.
        growth.handle(StepCompleted(step=step, samples_per_second=speed if step >= WARMING else 1.0))


def test_a_number_is_judged_once_it_was_measured_for_long_enough() -> None:
    growth = Growth(GrowSpec(steps=5), numbers=range(1, 5))
    measured(growth, 1, 100.0, WARMING + 4)
    assert growth.verdict() is None
    measured(growth, 1, 100.0, WARMING + 5)  # a generation that is formed anew is measured anew
    verdict = growth.verdict()
    assert verdict is not None and verdict.workers == 2
    growth.note_asked(verdict)
    assert growth.verdict() is None  # it is on the way
    growth.handle(Resized(before=1, workers=2, reason=verdict.reason))
    assert growth.verdict() is None  # and not there yet
    measured(growth, 2, 101.0, WARMING + 5)
    back = growth.verdict()
    assert back is not None and back.workers == 1
    growth.note_asked(back)
    growth.handle(Resized(before=2, workers=1, reason=back.reason))
    growth.handle(formed(1))
    last = growth.verdict()
    assert last is not None and growth.is_last(last)


def test_whoever_resizes_by_hand_has_the_last_word() -> None:
    growth = Growth(GrowSpec(steps=5), numbers=range(1, 5))
    growth.handle(Resized(before=1, workers=3))
    measured(growth, 3, 300.0, WARMING + 5)
    assert growth.is_over and growth.verdict() is None


def test_while_somebody_is_lost_nothing_is_decided() -> None:
    growth = Growth(GrowSpec(steps=5), numbers=range(2, 5))
    measured(growth, 1, 100.0, WARMING + 5)
    assert growth.verdict() is None


def test_asking_for_more_does_not_hold_up_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    """It replaces a coordinator that has just died: were it to wait for that one, all leases would be over."""
    waited: list[float] = []

    def resize(request: pb.ResizeRequest, timeout: float, **_: object) -> pb.ResizeReply:
        waited.append(timeout)
        return pb.ResizeReply()

    with closing(SupervisorClient("127.0.0.1:1", "token", timeout=600.0)) as client:
        monkeypatch.setattr(client._stub, "Resize", resize)
        client.resize(2, reason="one more is tried")
        client.resize(2)
    assert waited == [60.0, 600.0]
