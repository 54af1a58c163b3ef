"""Columns read at once are what stacking their samples one by one gives, to the last bit; the rest is left alone."""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from quorate.data.collate import collate
from quorate.data.datasets import columns_of
from quorate.data.feed import Feed
from quorate.data.sampler import Request, Source
from quorate.data.samples import Batch, FetchFailure, Samples

ROWS = 6
WANTED = (3, 1, 1, 5)


def one_by_one(samples: Any) -> Any:
    return collate(samples)


def read(dataset: Any, how: Any, indices: tuple[int, ...] = WANTED) -> Batch | FetchFailure:
    return Samples({Source.TRAINING: dataset}, how, seed=0)[Request(Source.TRAINING, 0, indices)]


def batch(dataset: Any, how: Any, indices: tuple[int, ...] = WANTED) -> list[torch.Tensor]:
    answer = read(dataset, how, indices)
    assert isinstance(answer, Batch), answer
    tensors: list[torch.Tensor] = answer.content
    return tensors


def assert_alike(dataset: Any, indices: tuple[int, ...] = WANTED) -> None:
    at_once, stacked = batch(dataset, collate, indices), batch(dataset, one_by_one, indices)
    assert type(at_once) is type(stacked)
    for ours, plain in zip(at_once, stacked, strict=True):
        assert (ours.dtype, ours.shape, ours.stride()) == (plain.dtype, plain.shape, plain.stride())
        assert bits(ours) == bits(plain)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.resolve_conj().contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def column(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.randint(0, 2, (ROWS, *shape)).bool()
    size = ROWS * torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).view(ROWS, *shape)


TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]
TYPES += [torch.bool, torch.uint8, torch.int16, torch.int64, torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (0,), (1, 2, 2)], ids=str)
def test_a_column_of_any_type_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Bits at random: a NaN keeps its own."""
    assert_alike(TensorDataset(column(dtype, *shape)))


def test_a_type_that_torch_stacks_but_does_not_select_from_is_read_one_by_one() -> None:
    assert columns_of(TensorDataset(column(torch.uint16))) is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(ROWS, 3, dtype=torch.complex64).conj(),
        torch.randn(ROWS, 1, 2, 2).to(memory_format=torch.channels_last),
        torch.randn(ROWS, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.randn(3, ROWS).T,
        torch.randn(1).expand(ROWS),
        torch.randn(2 * ROWS, 2)[::2],
    ],
    ids=["conjugated", "one channel last", "channels last", "transposed", "expanded", "every other row"],
)
def test_a_column_that_lies_in_memory_in_its_own_way(tensor: torch.Tensor) -> None:
    assert_alike(TensorDataset(tensor, torch.arange(ROWS)))


@pytest.mark.parametrize(
    "indices",
    [
        [5, 0, 3, 3],
        range(1, 5),
        torch.tensor([4, 2, 0, 1]),
        numpy.array([4, 2, 0, 1], dtype=numpy.uint8),
        [-1, -2, 0, 1],
    ],
    ids=["list", "range", "tensor", "array", "from the end"],
)
def test_a_part_and_a_part_of_a_part(indices: Any) -> None:
    part = Subset(TensorDataset(torch.randn(ROWS, 2), torch.arange(ROWS)), indices)
    assert_alike(part, (2, 0, 1))
    assert_alike(Subset(part, [3, 1, 0]), (2, 0, 1))


@pytest.mark.parametrize("indices", [[True, False, True], [0.0, 1.0, 2.0]], ids=["a mask", "fractions"])
def test_indices_that_are_no_whole_numbers_fail_as_they_do_one_by_one(indices: Any) -> None:
    part = Subset(TensorDataset(torch.randn(ROWS, 2)), indices)
    at_once, stacked = read(part, collate, (0, 1)), read(part, one_by_one, (0, 1))
    assert isinstance(at_once, FetchFailure)
    assert isinstance(stacked, FetchFailure)


def test_a_batch_has_memory_of_its_own() -> None:
    dataset = TensorDataset(torch.zeros(ROWS, 2))
    for tensor in batch(dataset, collate):
        tensor.add_(1)
    assert not dataset.tensors[0].any()


class Doubling(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return tuple(2 * tensor[index] for tensor in self.tensors)


class Plain(Dataset[Any]):
    tensors = (torch.zeros(ROWS),)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> int:
        return index


class Marked(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "dataset",
    [
        Doubling(torch.ones(ROWS)),
        Subset(Doubling(torch.ones(ROWS)), [1, 2]),
        Plain(),
        [(torch.zeros(1),)],
        TensorDataset(torch.zeros(ROWS, requires_grad=True)),
        TensorDataset(torch.zeros(ROWS).as_subclass(Marked)),
        TensorDataset(torch.eye(ROWS).to_sparse()),
    ],
    ids=["a subclass", "a part of one", "another set", "a list", "with a graph", "more than a tensor", "sparse"],
)
def test_what_may_be_more_than_columns_is_none(dataset: Any) -> None:
    assert columns_of(dataset) is None


def test_batches_that_are_sent_to_a_device_are_made_ahead_by_a_thread_in_the_memory_they_are_sent_from() -> None:
    tensors = torch.arange(60.0).view(20, 3), torch.arange(20)
    dataset = Subset(TensorDataset(*tensors), list(range(19, -1, -1)))
    requests = [Request(Source.TRAINING, 0, (first, first + 5, 2)) for first in range(10)]
    rooms: list[tuple[int, str]] = []

    def room(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        place = torch.empty(tuple(shape), dtype=dtype)
        rooms.append((place.data_ptr(), threading.current_thread().name))
        return place

    samples = Samples({Source.TRAINING: dataset}, collate, 5)
    plain, sent = (Feed(samples, iter(requests), 4, 1, room=each) for each in (None, room))
    for request in requests:
        left, right = plain.next(request).content, sent.next(request).content
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
        assert {tensor.data_ptr() for tensor in right} <= {pointer for pointer, _ in rooms}
    sent.close()
    assert {name for _, name in rooms} == {"batch-maker"}


class Broken(RuntimeError):
    pass


def test_what_goes_wrong_while_a_batch_is_made_ahead_is_raised_when_its_turn_comes() -> None:
    requests = [Request(Source.TRAINING, 0, (number,)) for number in range(4)]
    rooms: list[int] = []

    def room(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        rooms.append(len(rooms))
        if len(rooms) == 3:
            raise Broken
        return torch.empty(tuple(shape), dtype=dtype)

    samples = Samples({Source.TRAINING: TensorDataset(torch.arange(8))}, collate, 5)
    feed = Feed(samples, iter(requests), 0, 1, room=room)
    assert [feed.next(request).content[0].tolist() for request in requests[:2]] == [[0], [1]]
    with pytest.raises(Broken):
        feed.next(requests[2])
    feed.begin_again(iter(requests[1:]))
    assert [feed.next(request).content[0].tolist() for request in requests[1:]] == [[1], [2], [3]]
    feed.close()


def test_the_plan_of_tensors_in_memory_is_followed_no_further_than_batches_are_made_ahead() -> None:
    """It calls order(), which may fail: then the steps before should have been done."""
    planned: list[int] = []

    def plan() -> Iterator[Request]:
        for number in range(100):
            planned.append(number)
            yield Request(Source.TRAINING, 0, (number % 8,), lane=number % 2)

    samples = Samples({Source.TRAINING: TensorDataset(torch.arange(8))}, collate, 5)
    feed = Feed(samples, plan(), 0, 1, prefetch=2, lanes=2, room=lambda shape, dtype: torch.empty(*shape, dtype=dtype))
    for number in range(5):
        feed.next(Request(Source.TRAINING, 0, (number % 8,), lane=number % 2))
    feed.close()
    assert len(planned) == 5 + 2
