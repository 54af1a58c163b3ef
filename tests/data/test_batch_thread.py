"""Batches that are put together ahead: nobody waits for more of them than is wanted."""

import threading
from typing import Any

import pytest

from command import await_condition
from quorate.data.prefetch import BatchThread
from quorate.data.sampler import Request, Source
from quorate.data.samples import Batch

REQUESTS = [Request(Source.TRAINING, 0, (number,)) for number in range(4)]


class HeldUp:
    """Samples that come when they are let go."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.let_go = threading.Event()

    def __getitem__(self, request: Request) -> Batch:
        self.asked.append(request)
        assert self.let_go.wait(20)
        return Batch(request, None)


@pytest.fixture
def held_up() -> Any:
    samples = HeldUp()
    yield samples
    samples.let_go.set()


def test_closing_waits_neither_for_the_batch_that_is_being_read_nor_for_those_after_it(held_up: Any) -> None:
    maker = BatchThread(held_up)
    for request in REQUESTS:
        maker.begin(request)
    await_condition("the thread", lambda: len(held_up.asked) == 1)
    thread = next(each for each in threading.enumerate() if each.name == "batch-maker")
    maker.close()
    assert thread.is_alive(), "it is still reading"
    held_up.let_go.set()
    thread.join(20)
    assert not thread.is_alive()
    assert held_up.asked == REQUESTS[:1]


def test_whoever_waits_for_a_batch_hears_that_nobody_wants_it_any_more(held_up: Any) -> None:
    maker = BatchThread(held_up)
    pending = maker.begin(REQUESTS[0])

    def check() -> None:
        raise RuntimeError("the generation is over")

    with pytest.raises(RuntimeError, match="the generation is over"):
        maker.take(pending, check)
    maker.close()


def test_batches_come_in_the_order_in_which_they_are_asked_for(held_up: Any) -> None:
    maker = BatchThread(held_up)
    held_up.let_go.set()
    pending = [maker.begin(request) for request in REQUESTS]
    assert [maker.take(each).request for each in pending] == REQUESTS
    maker.close()
