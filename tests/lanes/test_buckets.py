from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorate.lanes.buckets import MEBIBYTE, Slot, TensorShape, plan_buckets

KIB = 1 / 1024


def floats(name: str, numel: int) -> TensorShape:
    return TensorShape(name, "float32", 4, numel)


def test_tensors_fill_buckets_in_reverse_registration_order() -> None:
    buckets = plan_buckets([floats("a", 100), floats("b", 100), floats("c", 100)], 800 / MEBIBYTE)
    assert [[slot.name for slot in bucket.slots] for bucket in buckets] == [["c", "b"], ["a"]]
    assert buckets[0].slots == (Slot("c", 2, 0, 100), Slot("b", 1, 100, 100))
    assert [bucket.numel for bucket in buckets] == [200, 100]


def test_a_new_bucket_begins_where_the_type_changes() -> None:
    half = TensorShape("half", "bfloat16", 2, 10)
    buckets = plan_buckets([floats("a", 10), half, floats("b", 10)], 1)
    assert [(bucket.dtype, bucket.slots[0].name) for bucket in buckets] == [
        ("float32", "b"),
        ("bfloat16", "half"),
        ("float32", "a"),
    ]


def test_a_tensor_larger_than_a_bucket_has_its_own() -> None:
    buckets = plan_buckets([floats("small", 1), floats("large", 1000), floats("last", 1)], KIB)
    assert [[slot.name for slot in bucket.slots] for bucket in buckets] == [["last"], ["large"], ["small"]]


def test_nothing_makes_no_bucket() -> None:
    assert plan_buckets([], 1) == ()


@pytest.mark.parametrize("size", [0.0, -1.0, float("nan")])
def test_a_bucket_without_room_is_refused(size: float) -> None:
    with pytest.raises(ValueError, match=f"bucket_mb is {size}"):
        plan_buckets([floats("a", 1)], size)


@given(st.lists(st.tuples(st.sampled_from([("float32", 4), ("bfloat16", 2)]), st.integers(0, 600))))
def test_every_tensor_has_one_slot_and_no_bucket_is_needlessly_cut(drawn: list[tuple[tuple[str, int], int]]) -> None:
    tensors = [TensorShape(str(i), dtype, size, numel) for i, ((dtype, size), numel) in enumerate(drawn)]
    buckets = plan_buckets(tensors, KIB)
    slots = list(chain.from_iterable(bucket.slots for bucket in buckets))
    assert [slot.index for slot in slots] == list(reversed(range(len(tensors))))
    for bucket in buckets:
        ends = [0]
        for slot in bucket.slots:
            assert slot.offset == ends[-1]
            assert tensors[slot.index].dtype == bucket.dtype
            ends.append(slot.offset + slot.numel)
        assert bucket.numel == ends[-1]
        size = sum(tensors[slot.index].nbytes for slot in bucket.slots)
        assert size <= 1024 or len([slot for slot in bucket.slots if slot.numel]) == 1
    for bucket, following in pairwise(buckets):
        size = sum(tensors[slot.index].nbytes for slot in bucket.slots)
        first = tensors[following.slots[0].index]
        assert first.dtype != bucket.dtype or size + first.nbytes > 1024
