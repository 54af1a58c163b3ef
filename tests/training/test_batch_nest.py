"""Batches as nests: what makes two of them alike, and what is left of one when its tensors are changed."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quorate.data.collate import StructureError, mapped, structure_of


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Sample:
    image: Any
    label: Any


TENSORS = st.builds(
    lambda shape, dtype: torch.zeros(shape, dtype=dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.int64, torch.uint8]),
)
PLAIN = st.one_of(st.none(), st.booleans(), st.integers(-2, 2), st.floats(), st.sampled_from(["a", "b", b"a"]))
NESTS = st.recursive(
    TENSORS | PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Pair, inner, inner),
        st.builds(Sample, inner, inner),
        st.dictionaries(st.sampled_from(["x", "y", 1]), inner, max_size=3),
    ),
    max_leaves=6,
)


@given(NESTS)
def test_other_content_in_its_tensors_leaves_a_batch_alike(batch: Any) -> None:
    structure, tensors = structure_of(batch)
    other = mapped(batch, lambda tensor: torch.ones_like(tensor))
    again, filled = structure_of(other)
    assert again == structure
    assert hash(again) == hash(structure)
    assert [one.shape for one in filled] == [one.shape for one in tensors]
    assert all(bool((one == 1).all()) for one in filled)
    assert all(bool((one == 0).all()) for one in tensors)


@given(NESTS, NESTS)
def test_batches_are_alike_only_where_everything_but_content_is_equal(left: Any, right: Any) -> None:
    def bare(batch: Any) -> str:
        return repr(mapped(batch, lambda one: torch.empty(one.shape, dtype=one.dtype, device="meta")))

    assert (structure_of(left)[0] == structure_of(right)[0]) == (bare(left) == bare(right))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ([1], (1,)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)),
    ],
)
def test_what_looks_alike_and_may_be_told_apart_by_code_is_not_alike(left: Any, right: Any) -> None:
    assert structure_of(left)[0] != structure_of(right)[0]


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ([numpy.zeros(2)], "numpy.ndarray"),
        ({"x": object()}, "builtins.object"),
        (torch.zeros(3).to_sparse(), "of a kind of its own"),
        (torch.zeros(3).expand(2, 3), "gaps or overlaps"),
        (torch.zeros(4, 4)[:, ::2], "gaps or overlaps"),
        (torch.zeros(2, requires_grad=True), "requires a gradient"),
    ],
)
def test_what_cannot_be_compared_is_named(batch: Any, words: str) -> None:
    with pytest.raises(StructureError, match=words):
        structure_of(batch)
