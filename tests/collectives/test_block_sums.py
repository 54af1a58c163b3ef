import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collectives.reference import bits, wide_values
from quorate.collectives import reduction
from quorate.collectives.block_sums import add_up_block, pieces_of
from quorate.collectives.reduction import sum_lanes
from quorate.lanes.buckets import Bucket, Slot


def bucket_of(sizes: list[int]) -> Bucket:
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    slots = [Slot(f"t{i}", i, offset, size) for i, (offset, size) in enumerate(zip(offsets, sizes, strict=True))]
    return Bucket("torch.float32", tuple(slots), sum(sizes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    lanes=st.integers(1, 8),
    seed=st.integers(0, 1000),
    stretch=st.integers(1, 40),
)
def test_the_sum_of_a_block_is_the_one_of_its_bucket(
    dtype: torch.dtype, sizes: list[int], lanes: int, seed: int, stretch: int
) -> None:
    bucket = bucket_of(sizes)
    values = [value.to(dtype) for value in wide_values(lanes, bucket.numel, seed)]
    whole = torch.empty(bucket.numel, dtype=dtype)
    sum_lanes(values, whole)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reduction, "STRETCH", stretch)
        for slot in bucket.slots:
            place = slice(slot.offset, slot.offset + slot.numel)
            total = torch.full((slot.numel,), 7, dtype=dtype)
            add_up_block([value[place] for value in values], pieces_of(bucket, slot, lanes), total)
            assert bits(total) == bits(whole[place])


def test_the_sign_of_a_zero_is_kept() -> None:
    bucket = bucket_of([3])
    total = torch.ones(3)
    add_up_block([torch.full((3,), -0.0)] * 2, pieces_of(bucket, bucket.slots[0], 2), total)
    assert torch.signbit(total).all()
