import dataclasses
import re
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from quorate.data.collate import UnlikeSamples, collate, fresh_copy


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


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        ([(1, 2), (1, 3), (1,)], "samples 0 and 2 of a batch differ: one has 2 values, the other 1 values"),
        ([{"a": 1}, {"b": 1}], "differ: one has the keys a, the other the keys b"),
        ([torch.zeros(2), torch.zeros(3)], "differ: one has shape (2,), the other shape (3,)"),
        ([{"x": (1, numpy.zeros(2))}, {"x": (1, numpy.zeros(4))}], "one has shape (2,), the other shape (4,)"),
        ([Point(torch.zeros(1), 1), Point(torch.zeros(2), 1)], "one has shape (1,), the other shape (2,)"),
        ([(1, None), (2, None)], "sample 0 of a batch holds nothing (None), which cannot be stacked"),
        ([1, None], "differ: one is the int 1, the other nothing (None)"),
    ],
)
def test_samples_that_make_no_batch_are_named_with_what_differs(samples: list[Any], text: str) -> None:
    with pytest.raises(UnlikeSamples, match=re.escape(text)):
        collate(samples)


def test_keys_may_come_in_another_order_and_more_of_them_are_left_out() -> None:
    assert collate([{"a": 1, "b": 2}, {"b": 4, "a": 3, "c": 5}])["b"].tolist() == [2, 4]


def test_an_error_that_is_not_about_a_difference_stays_as_it_is() -> None:
    @dataclass
    class Picky:
        size: Any

        def __post_init__(self) -> None:
            if isinstance(self.size, torch.Tensor):
                raise ValueError("no tensors here")

    with pytest.raises(ValueError, match="no tensors here"):
        collate([Picky(1), Picky(2)])


def test_a_batch_of_one() -> None:
    assert collate([3.5]).tolist() == [3.5]


class Graph:
    """A sample of a class of the task."""

    def __init__(self, nodes: torch.Tensor) -> None:
        self.nodes = nodes
        self.more = OrderedDict(edges=[numpy.zeros(2)])


def test_a_fresh_copy_shares_nothing_that_can_be_changed() -> None:
    graph = Graph(torch.zeros(3))
    batch: dict[str, Any] = {
        "graphs": [graph],
        "pair": Pair(torch.zeros(2), 1),
        "names": ("a", {"b"}),
        "kinds": OrderedDict(x=[1]),
    }
    copied = fresh_copy(batch)
    copied["graphs"][0].nodes += 1
    copied["graphs"][0].more["edges"][0] += 1
    copied["names"][1].add("c")
    copied["kinds"]["x"].append(2)
    copied["pair"].first.add_(1)
    assert graph.nodes.tolist() == [0, 0, 0]
    assert graph.more["edges"][0].tolist() == [0, 0]
    assert batch["names"] == ("a", {"b"})
    assert batch["kinds"] == OrderedDict(x=[1])
    assert batch["pair"].first.tolist() == [0, 0]
    assert [type(copied[key]) for key in batch] == [list, Pair, tuple, OrderedDict]


def test_what_nobody_can_copy_is_handed_on() -> None:
    lock, computed = threading.Lock(), torch.zeros(1, requires_grad=True) * 2
    given = fresh_copy([lock, {"graph": Graph(computed)}])
    assert given[0] is lock
    assert given[1]["graph"].nodes is computed
