"""Threads that help with reading: nobody waits for one, and no more is done than is wanted."""

import threading
from collections.abc import Iterator
from functools import partial

import pytest

from command import await_condition
from quorate.data.threads import Closed, HelperThreads


class HeldUp:
    """Work that is done when it is let go."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.let_go = threading.Event()

    def work(self, number: int) -> int:
        self.begun.append(number)
        assert self.let_go.wait(60)
        return number


@pytest.fixture
def held_up() -> Iterator[HeldUp]:
    work = HeldUp()
    yield work
    work.let_go.set()


def test_closing_waits_neither_for_what_is_being_done_nor_for_what_comes_after_it(held_up: HeldUp) -> None:
    helpers = HelperThreads("the-helper", most=1)
    for number in range(4):
        helpers.submit(partial(held_up.work, number))
    await_condition("the thread", lambda: len(held_up.begun) == 1)
    thread = next(each for each in threading.enumerate() if each.name == "the-helper")
    helpers.close(0.05)
    assert thread.is_alive(), "it is still at work"
    held_up.let_go.set()
    thread.join(60)
    assert not thread.is_alive()
    assert held_up.begun == [0]
    with pytest.raises(Closed):
        helpers.submit(lambda: 1)


def test_one_thread_does_its_work_in_order(held_up: HeldUp) -> None:
    helpers = HelperThreads("the-helper", most=1)
    held_up.let_go.set()
    futures = [helpers.submit(partial(held_up.work, number)) for number in range(4)]
    assert [each.result(60) for each in futures] == held_up.begun == list(range(4))
    helpers.close()


def test_a_thread_is_started_only_where_all_are_busy(held_up: HeldUp) -> None:
    helpers = HelperThreads("one-of-many")
    held_up.let_go.set()
    for _ in range(3):
        helpers.submit(lambda: held_up.work(0)).result(60)
        await_condition("the thread, which counts as busy until it has told", lambda: helpers._idle == 1)
    assert [each.name for each in threading.enumerate()].count("one-of-many") == 1
    held_up.let_go.clear()
    futures = [helpers.submit(lambda: held_up.work(0)) for _ in range(3)]
    assert [each.name for each in threading.enumerate()].count("one-of-many") == 3
    held_up.let_go.set()
    assert [each.result(60) for each in futures] == [0, 0, 0]
    helpers.close()


def test_what_is_raised_is_told_and_the_thread_lives_on() -> None:
    helpers = HelperThreads("the-helper", most=1)
    with pytest.raises(ZeroDivisionError):
        helpers.submit(lambda: 1 / 0).result(60)
    assert helpers.submit(lambda: 2).result(60) == 2
    helpers.close()
