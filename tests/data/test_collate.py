import dataclasses
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from quorate.data.collate import collate


@dataclass
class Point:
    inputs: torch.Tensor
    label: int


@dataclass(frozen=True)
class Nested:
    point: Point
    weight: float
    name: str


@dataclass
class Derived:
    inputs: torch.Tensor
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = self.inputs.numel()


class Pair(NamedTuple):
    first: Any
    second: Any


def test_tuples_become_lists_of_columns_as_in_torch() -> None:
    inputs, labels = collate([(torch.zeros(2), 1), (torch.ones(2), 2)])
    assert torch.equal(inputs, torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    assert torch.equal(labels, torch.tensor([1, 2]))


def test_dicts_keep_their_keys_at_any_depth() -> None:
    batch = collate([{"a": {"b": [i, (i, -i)]}, "c": numpy.full(2, i)} for i in range(3)])
    assert list(batch) == ["a", "c"]
    assert batch["a"]["b"][0].tolist() == [0, 1, 2]
    assert batch["a"]["b"][1][1].tolist() == [0, -1, -2]
    assert batch["c"].tolist() == [[0, 0], [1, 1], [2, 2]]


def test_dataclasses_stay_dataclasses_at_any_depth() -> None:
    batch = collate([Nested(Point(torch.full((2,), float(i)), i), i / 2, f"n{i}") for i in range(2)])
    assert isinstance(batch, Nested)
    assert isinstance(batch.point, Point)
    assert batch.point.inputs.tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert torch.equal(torch.as_tensor(batch.point.label), torch.tensor([0, 1]))
    assert torch.equal(torch.as_tensor(batch.weight), torch.tensor([0.0, 0.5], dtype=torch.float64))
    assert list(batch.name) == ["n0", "n1"]


def test_dataclasses_inside_dicts_tuples_and_named_tuples() -> None:
    batch = collate([Pair({"p": Point(torch.zeros(1), i)}, (Point(torch.ones(1), -i), "x")) for i in range(2)])
    assert isinstance(batch, Pair)
    assert batch.first["p"].label.tolist() == [0, 1]
    assert batch.second[0].label.tolist() == [0, -1]
    assert batch.second[1] == ["x", "x"]


def test_a_field_that_is_not_given_but_made_is_made_anew() -> None:
    batch = collate([Derived(torch.zeros(2)), Derived(torch.zeros(2))])
    assert [f.name for f in dataclasses.fields(batch)] == ["inputs", "size"]
    assert batch.size == 4


@pytest.mark.parametrize("samples", [[(1, 2), (1,)], [{"a": 1}, {"b": 1}], [torch.zeros(2), torch.zeros(3)]])
def test_samples_of_different_structure_are_an_error(samples: list[Any]) -> None:
    with pytest.raises((ValueError, KeyError, RuntimeError)):
        collate(samples)


def test_a_batch_of_one() -> None:
    assert collate([3.5]).tolist() == [3.5]
