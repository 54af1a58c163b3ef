"""Digests, and the seeds of random streams."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorate.core.digests import (
    NamedBytes,
    content_digest,
    derive_seed,
    first_difference,
    tensor_digest,
    weights_digest,
)

WEIGHT = NamedBytes("weight", "torch.float32", (2, 2), bytes(16))
BIAS = NamedBytes("bias", "torch.float32", (2,), bytes(8))
OTHERS = [
    replace(WEIGHT, name="weights"),
    replace(WEIGHT, dtype="torch.int32"),
    replace(WEIGHT, shape=(4,)),
    replace(WEIGHT, content=bytes(15) + b"\1"),
]


def digested(*tensors: NamedBytes) -> dict[str, str]:
    return {tensor.name: tensor_digest(tensor) for tensor in tensors}


@pytest.mark.parametrize("other", OTHERS, ids=["name", "type", "shape", "content"])
def test_name_type_shape_and_content_all_count(other: NamedBytes) -> None:
    assert tensor_digest(other) != tensor_digest(WEIGHT)
    assert weights_digest(digested(other, BIAS)) != weights_digest(digested(WEIGHT, BIAS))


def test_the_weights_digest_does_not_depend_on_the_order() -> None:
    assert weights_digest(digested(WEIGHT, BIAS)) == weights_digest(digested(BIAS, WEIGHT))
    assert len(weights_digest({})) == 64


def test_the_kind_of_buffer_does_not_count() -> None:
    view = replace(WEIGHT, content=memoryview(bytearray(16)))
    assert tensor_digest(view) == tensor_digest(WEIGHT)
    assert content_digest(b"abc") == content_digest(memoryview(b"abc")) != content_digest(b"abd")


def test_the_first_difference_is_named_in_order() -> None:
    left = {"a": "1", "b": "2", "c": "3"}
    assert first_difference(left, dict(left)) is None
    assert first_difference(left, left | {"c": "x", "b": "y"}) == "b"
    assert first_difference(left, {"b": "2", "c": "3"}) == "a"
    assert first_difference({}, {"z": "1"}) == "z"


labels = st.lists(st.integers(0, 2**40) | st.text(max_size=8).filter(lambda text: "/" not in text), max_size=4)


@given(st.integers(0, 2**63 - 1), labels)
def test_a_seed_is_a_fact_of_its_labels_and_fits_63_bits(seed: int, names: list[int | str]) -> None:
    derived = derive_seed(seed, *names)
    assert derived == derive_seed(seed, *names)
    assert 0 <= derived < 2**63


@given(labels, labels)
def test_other_labels_give_another_seed(left: list[int | str], right: list[int | str]) -> None:
    assert (derive_seed(0, *left) == derive_seed(0, *right)) == (left == right)


def test_seeds_that_add_up_to_the_same_do_not_meet() -> None:
    assert derive_seed(1, "lane", 2, 0) != derive_seed(2, "lane", 1, 0)
    assert derive_seed(0, "lane", 1, 12) != derive_seed(0, "lane", 11, 2)
    assert derive_seed(0, 1) != derive_seed(0, "1")
