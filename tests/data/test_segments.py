"""The memory that a loader and its worker share is used again, and never while anything still refers to it."""

import os
import socket
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

from quorate.data.batch_message import LEAST_SHARED, pack, receive, send, unpack
from quorate.data.collate import collate
from quorate.data.segments import MappedSegments, Segments

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
        self.loader.begin()
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


def test_what_is_collated_in_room_is_sent_where_it_lies(pair: Pair, created: list[int]) -> None:
    samples = [{"image": torch.full((3, 64, 64), n, dtype=torch.uint8), "label": n} for n in range(16)]
    pair.carry(collate(samples))
    pair.ask()
    batch = collate(samples, pair.loader.room)
    message = pack(batch)
    assert pair.loader.place([piece.memory for piece in message.beside]) is not None
    batch["image"].fill_(7)  # in the segment, so the worker would see it
    assert pair.worker.open(0, 0, None)[0] == 7
    assert len(created) == 1


def test_without_room_for_all_of_it_the_rest_is_copied(pair: Pair) -> None:
    pair.carry(torch.zeros(SIZE, dtype=torch.uint8))
    pair.ask()
    first = pair.loader.room((SIZE,), torch.uint8)
    assert first is not None
    assert pair.loader.room((SIZE,), torch.uint8) is None
    got = pair.carry([first.fill_(1), torch.full((SIZE,), 2, dtype=torch.uint8)])
    assert [part.unique().tolist() for part in got] == [[1], [2]]


@pytest.mark.parametrize(
    "samples",
    [
        [torch.rand(3, 40, 40) for _ in range(4)],
        [torch.rand(1, 40, 40) for _ in range(4)],
        [torch.rand(40, 40, 3).permute(2, 0, 1) for _ in range(4)],
        [torch.rand(2000), torch.rand(2000).double()],
        [torch.rand(5000)[::2], torch.rand(2500)],
        [torch.zeros(0) for _ in range(3)],
    ],
)
def test_a_batch_in_room_is_what_it_is_elsewhere(pair: Pair, samples: list[torch.Tensor]) -> None:
    pair.carry(torch.zeros(SIZE))
    pair.ask()
    plain, placed = collate(samples), collate(samples, pair.loader.room)
    assert torch.equal(plain, placed)
    assert (plain.dtype, plain.stride()) == (placed.dtype, placed.stride())


def test_samples_that_do_not_make_a_batch_are_told_apart_in_room_too(pair: Pair) -> None:
    pair.carry(torch.zeros(SIZE))
    pair.ask()
    with pytest.raises(Exception, match="one has shape"):
        collate([torch.zeros(2000), torch.zeros(2001)], pair.loader.room)
