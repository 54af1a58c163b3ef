"""The memory that a loader and its worker share is used again, and never while anything still refers to it."""

import os
import socket
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

from quorate.data.batch_message import LEAST_SHARED, MappedSegments, Segments, pack, receive, send, unpack

SIZE = 2 * LEAST_SHARED


class Pair:
    """Both ends in one process: a loader's segments and its worker's."""

    def __init__(self) -> None:
        self.loader, self.worker = Segments(), MappedSegments()
        self._ours, self._theirs = socket.socketpair()

    def carry(self, content: Any) -> Any:
        """To the worker, as a loader answers a request."""
        send(self._theirs, pack(content), self.loader)
        return unpack(receive(self._ours, lambda: None, self.worker))

    def ask(self) -> list[int]:
        """The worker's next request, which says what it is done with."""
        released = self.worker.take_released()
        self.loader.release(released)
        return released

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The descriptors of memory that was taken from the system."""
    taken: list[int] = []
    create = os.memfd_create

    def counted(*arguments: Any) -> int:
        taken.append(create(*arguments))
        return taken[-1]

    monkeypatch.setattr(os, "memfd_create", counted)
    return taken


def test_one_segment_does_for_all_batches_of_a_worker_that_lets_go_of_each(pair: Pair, created: list[int]) -> None:
    for number in range(5):
        pair.ask()
        got = pair.carry({"a": torch.full((SIZE,), number, dtype=torch.uint8), "b": numpy.full(SIZE, number)})
        assert got["a"].eq(number).all()
        assert (got["b"] == number).all()
        del got
    assert len(created) == 1


@pytest.mark.parametrize("kept", ["tensor", "part", "array", "view"])
def test_a_segment_is_not_written_to_while_anything_of_its_batch_is_there(
    pair: Pair, created: list[int], kept: str
) -> None:
    got = pair.carry([torch.zeros(SIZE), numpy.zeros(SIZE)])
    held: dict[str, Any] = {"tensor": got[0], "part": got[0][5:7], "array": got[1], "view": memoryview(got[1])[3:9]}
    mine = held[kept]
    del got, held
    for _ in range(3):
        assert not pair.ask(), "something of it is still here"
        other = pair.carry([torch.ones(SIZE), numpy.ones(SIZE)])
        assert not numpy.asarray(mine).any()
        del other
        pair.ask()
    assert len(created) == 2
    del mine
    assert pair.ask(), "nobody has it any more"


def test_a_larger_batch_takes_the_place_of_what_is_too_small_for_it(pair: Pair, created: list[int]) -> None:
    for size in (SIZE, 4 * SIZE, 2 * SIZE, 3 * SIZE, SIZE):
        pair.ask()
        assert pair.carry(torch.arange(size)).sum() == size * (size - 1) // 2
    assert len(created) == 2
