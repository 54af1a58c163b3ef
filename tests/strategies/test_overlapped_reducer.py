"""The overlapped reducer sums what is ready while the rest is computed, and whatever happens in between, it ends."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from collectives.rings import everywhere, memory_rings
from plain_gradients import plain_gradients
from quorate.collectives.ring import Ring
from quorate.core.errors import PeerLost
from quorate.strategies.ring import OverlappedReducer
from wire.pairs import wait_until, within

WORKERS = 2


def reducers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "quorate-overlapped-reducer"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert reducers() == []


@pytest.fixture
def rings() -> Iterator[list[Ring]]:
    with memory_rings(lanes=WORKERS, workers=WORKERS, deadline=within(100)) as rings:
        yield rings


class Worker:
    """Two parameters, each with a bucket of its own; the gradient of the last one comes first."""

    def __init__(self, lane: int, ring: Ring) -> None:
        self.lane = lane
        self.ring = ring
        self.first, self.last = nn.Parameter(torch.full((300,), 2.0)), nn.Parameter(torch.full((300,), 3.0))
        parameters = [("first", self.first), ("last", self.last)]
        self.gradients = plain_gradients(parameters, range(lane, lane + 1), bucket_mb=0.0012)
        assert len(self.gradients.plan) == 2
        self.reducer = OverlappedReducer(ring, self.gradients)

    def backward(self, step: int, factor: float = 1.0) -> None:
        self.reducer.begin(step)
        self.gradients.begin(self.lane)
        self.gradients.backward((self.first * factor * self.last).sum(), 1.0, is_last=True)
        self.gradients.finish()

    def close(self) -> None:
        self.ring.close()
        self.reducer.close()


def test_the_first_bucket_is_summed_while_the_backward_pass_goes_on(rings: list[Ring]) -> None:
    def work(lane: int, ring: Ring) -> list[list[float]]:
        worker = Worker(lane, ring)
        summed = worker.gradients.total.buckets[0]
        worker.first.register_hook(lambda _: wait_until(lambda: bool(summed.all())))  # type: ignore[no-untyped-call]
        try:
            for step in (1, 2, 3):
                summed.zero_()
                worker.backward(step, factor=step + lane)
                worker.reducer.wait()
            return [sorted(set(bucket.tolist())) for bucket in worker.gradients.total.buckets]
        finally:
            worker.close()

    assert everywhere(rings, work) == [[[2.0 * (3 + 4)], [3.0 * (3 + 4)]]] * WORKERS


def test_an_error_of_a_sum_is_raised_to_whoever_waits_and_nothing_more_is_summed(rings: list[Ring]) -> None:
    worker = Worker(0, rings[0])
    rings[1].close()
    worker.backward(1)
    with pytest.raises(PeerLost):
        worker.reducer.wait()
    assert not worker.gradients.total.buckets[1].any()
    worker.close()


def test_closing_ends_a_wait() -> None:
    """As the end of the job does, from a thread of its own."""
    waiting = threading.Event()

    def deadline() -> float:
        waiting.set()
        return 10.0

    def close_while_it_waits(ring: Ring) -> None:
        assert waiting.wait(60)
        ring.close()

    with memory_rings(lanes=WORKERS, workers=WORKERS, deadline=deadline) as rings, ThreadPoolExecutor(1) as thread:
        worker = Worker(0, rings[0])
        closing = thread.submit(close_while_it_waits, rings[0])
        worker.backward(1)
        with pytest.raises(PeerLost, match="closed on this side"):
            worker.reducer.wait()
        closing.result()
        worker.close()


def test_an_exception_within_the_backward_pass_leaves_no_thread_that_waits_for_others(rings: list[Ring]) -> None:
    worker = Worker(0, rings[0])

    def fail(_: torch.Tensor) -> None:
        raise KeyError("of the model")

    worker.first.register_hook(fail)  # type: ignore[no-untyped-call]
    with pytest.raises(KeyError, match="of the model"):
        worker.backward(1)
    assert len(reducers()) == 1
    worker.close()


def test_additions_round_as_those_of_the_thread_that_trains(rings: list[Ring]) -> None:
    """Also where user code changes the mode within a step. The difference of these two is denormal."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    torch.set_flush_denormal(False)

    def work(lane: int, ring: Ring) -> list[torch.Tensor]:
        worker = Worker(lane, ring)
        worker.last.register_hook(lambda _: torch.set_flush_denormal(True) and None)  # type: ignore[no-untyped-call]
        try:
            worker.backward(1, factor=(1.5e-38, -1.2e-38)[lane])
            worker.reducer.wait()
            overlapped = worker.gradients.total.buckets[0].clone()
            lanes = [flat.buckets[0] for flat in worker.gradients.lanes.values()]
            ring.all_reduce(2, 0, lanes, worker.gradients.total.buckets[0])
            return [overlapped, worker.gradients.total.buckets[0]]
        finally:
            torch.set_flush_denormal(False)
            worker.close()

    # Looked at here: in the threads above, a denormal would look like a zero.
    for overlapped, plain in everywhere(rings, work):
        assert not plain.view(torch.int32).any(), "no addition was in the mode that this test is about"
        assert torch.equal(overlapped.view(torch.int32), plain.view(torch.int32))
