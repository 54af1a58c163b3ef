"""A sample's randomness belongs to the sample: to (seed, epoch, index) and to nothing else."""

import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from quorate.core.errors import TaskError
from quorate.data.collate import collate
from quorate.data.datasets import check_dataset, refuse_unpaired
from quorate.data.sampler import Request, Source
from quorate.data.samples import Batch, FetchFailure, Samples
from quorate.data.streams import seed_generators

Draw = tuple[float, float, float]


class Drawing:
    """Draws from all three generators, a different number of times for each sample."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Draw:
        for _ in range(index):
            torch.rand(1), numpy.random.rand(), random.random()
        return float(torch.rand(1)), float(numpy.random.rand()), random.random()


def as_list(samples: Any) -> Any:
    return list(samples)


def fetch_from(
    dataset: Any, indices: tuple[int, ...], *, seed: int = 1, epoch: int = 0, source: Source = Source.TRAINING
) -> Any:
    answer = Samples({source: dataset}, as_list, seed)[Request(source, epoch, indices)]
    assert isinstance(answer, Batch)
    return answer.content


def fetch(indices: tuple[int, ...], **keys: Any) -> list[Draw]:
    draws: list[Draw] = fetch_from(Drawing(), indices, **keys)
    return draws


@given(st.permutations(range(6)), st.integers(1, 5))
def test_neither_the_order_nor_the_company_of_a_sample_matters(order: list[int], at: int) -> None:
    alone = {index: fetch((index,))[0] for index in order}
    together = fetch(tuple(order[:at])) + fetch(tuple(order[at:]))
    assert dict(zip(order, together, strict=True)) == alone


@pytest.mark.parametrize("generator", [0, 1, 2], ids=["torch", "numpy", "python"])
def test_seed_epoch_index_and_set_each_give_another_stream(generator: int) -> None:
    streams = [
        fetch((3,)),
        fetch((4,)),
        fetch((3,), seed=2),
        fetch((3,), epoch=1),
        fetch((3,), source=Source.VALIDATION),
    ]
    assert len({draws[0][generator] for draws in streams}) == 5


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        ({"train": [1], "val": [2]}, "a dict with 'train', 'val'. Return the datasets in it"),
        ((torch.ones(8, 3), torch.ones(8)), "TensorDataset"),
        ((numpy.ones((8, 3)), numpy.ones(8)), "TensorDataset"),
        (((torch.ones(8, 3), torch.ones(8)), (torch.ones(4, 3), torch.ones(4))), "TensorDataset"),
        ((torch.ones(8, 3), torch.ones(4, 3)), ""),
        ((torch.ones(8, 3), torch.ones(8, 3)), ""),
        ({0: torch.ones(3), 1: torch.ones(3)}, ""),
        ([(torch.ones(3), torch.ones(1))] * 2, ""),
    ],
)
def test_what_would_pass_for_datasets_is_refused(sets: Any, told: str) -> None:
    if not told:
        refuse_unpaired(sets)
        return
    with pytest.raises(TaskError, match=told):
        refuse_unpaired(sets)


def test_what_was_drawn_before_does_not_matter() -> None:
    expected = fetch((2, 1))
    torch.rand(5), numpy.random.rand(3), random.random()
    assert fetch((2, 1)) == expected


class Seldom:
    """Draws for a few samples only."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> float:
        return float(torch.rand(1)) if index % 5 == 0 else float(index)


@given(st.lists(st.permutations(range(20)), min_size=1, max_size=3), st.integers(1, 7))
def test_samples_that_draw_are_the_same_whatever_was_read_before_them(orders: list[list[int]], batch_size: int) -> None:
    """The first batches are read without streams, until one draws: which one that is depends on who reads."""
    alone = {index: fetch_from(Seldom(), (index,))[0] for index in range(20)}
    samples = Samples({Source.TRAINING: Seldom()}, as_list, 1)
    for order in orders:
        for start in range(0, 20, batch_size):
            indices = tuple(order[start : start + batch_size])
            answer = samples[Request(Source.TRAINING, 0, indices)]
            assert isinstance(answer, Batch)
            assert answer.content == [alone[index] for index in indices]


@given(st.integers(0, 2**63 - 1))
def test_every_seed_is_one_that_all_generators_take(seed: int) -> None:
    def draw() -> tuple[float, float, float]:
        seed_generators(seed)
        return float(torch.rand(1)), float(numpy.random.rand()), random.random()

    assert draw() == draw()


class Failing:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> int:
        if index == 7:
            raise self.error
        return index


def trouble(dataset: Any, collate: Any, *indices: int) -> FetchFailure:
    answer = Samples({Source.TRAINING: dataset}, collate, 0)[Request(Source.TRAINING, 0, indices)]
    assert isinstance(answer, FetchFailure)
    return answer


@pytest.mark.parametrize("error", [ValueError("torn page"), SystemExit("torn page"), IndexError("torn page")])
def test_trouble_names_the_sample_and_shows_the_users_line(error: BaseException) -> None:
    told = trouble(Failing(error), as_list, 3, 7, 8)
    assert told.index == 7
    assert told.message == f"{type(error).__name__}: torn page"
    assert "raise self.error" in told.traceback
    assert "data/samples.py" not in told.traceback.replace("tests/data", "")


def test_a_keyboard_interrupt_is_not_the_samples_trouble() -> None:
    with pytest.raises(KeyboardInterrupt):
        trouble(Failing(KeyboardInterrupt()), as_list, 7)


def test_trouble_in_collate_names_no_sample() -> None:
    def refuse(samples: Any) -> Any:
        raise TypeError("cannot stack")

    told = trouble(Failing(ValueError()), refuse, 1, 2)
    assert told.index is None
    assert told.message == "TypeError: cannot stack"
    assert "in refuse" in told.traceback


def test_samples_that_make_no_batch_are_named_by_their_index() -> None:
    told = trouble([torch.zeros(2), torch.zeros(2), torch.zeros(3)], collate, 1, 2)
    assert told.message == "samples 1 and 2 of the training set differ: one has shape (2,), the other shape (3,)"
    assert "collate(self, samples)" in told.hint
    assert told.traceback == ""


class Streamed(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


class OnlyItems:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        (
            Streamed(),
            r"(?s)returned a Streamed as the training set.*quorate\.Stream\(open, samples=N\)"
            r".*quorate\.Shards\(PATH\).*quorate data index PATH",
        ),
        (iter([1]), "list_iterator as the training set, which has no len"),
        (OnlyItems(), "returned an OnlyItems as the training set, which has no len"),
        ({1, 2}, r"set as the training set, which has no \[\]"),
        ([], "training set that datasets.. returned is empty"),
        (None, r"returned nothing \(None\) as the training set.*Is a `return` missing"),
        (Streamed, r"returned the class Streamed as the training set.*Is `\(\)` missing after Streamed"),
        (DataLoader(Streamed()), "returned a DataLoader as the training set; give the dataset that is inside it"),
    ],
)
def test_what_cannot_be_read_by_index_is_refused(dataset: Any, text: str) -> None:
    with pytest.raises(TaskError, match=text):
        check_dataset(dataset, "training")


@pytest.mark.parametrize("dataset", [[1], (1,), numpy.zeros(3), torch.zeros(3), Drawing()])
def test_anything_with_a_length_and_items_will_do(dataset: Any) -> None:
    assert check_dataset(dataset, "training") is dataset


def test_samples_module_is_ours() -> None:
    """The traceback test above compares paths; it would prove nothing if the module moved."""
    assert sys.modules[Samples.__module__].__file__.endswith("quorate/data/samples.py")  # type: ignore[union-attr]
