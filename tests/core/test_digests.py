from dataclasses import replace

import pytest

from quorate.core.digests import NamedBytes, content_digest, first_difference, tensor_digest, weights_digest

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
