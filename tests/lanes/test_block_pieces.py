from hypothesis import given
from hypothesis import strategies as st

from quorate.collectives.block_sums import pieces_of, plan_blocks
from quorate.lanes.buckets import Bucket, TensorShape, plan_buckets
from quorate.lanes.chunks import cut, summation_order

SHAPES = st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["float32", "float64"])), min_size=1, max_size=8)


def planned(shapes: list[tuple[int, str]], bucket_bytes: int) -> tuple[Bucket, ...]:
    tensors = [TensorShape(f"t{i}", dtype, 4, numel) for i, (numel, dtype) in enumerate(shapes)]
    return plan_buckets(tensors, bucket_bytes / 2**20)


@given(shapes=SHAPES, lanes=st.integers(1, 9), bucket_bytes=st.integers(1, 400))
def test_each_element_is_summed_once_in_the_order_of_its_chunk_of_the_bucket(
    shapes: list[tuple[int, str]], lanes: int, bucket_bytes: int
) -> None:
    plan = planned(shapes, bucket_bytes)
    for bucket in plan:
        expected = [
            summation_order(chunk, lanes)
            for chunk, place in enumerate(cut(bucket.numel, lanes))
            for _ in range(place.start, place.stop)
        ]
        for slot in bucket.slots:
            orders: list[tuple[int, ...]] = []
            for piece in pieces_of(bucket, slot, lanes):
                assert piece.place.start == len(orders)
                assert piece.place.stop > piece.place.start
                orders += [piece.order] * (piece.place.stop - piece.place.start)
            assert orders == expected[slot.offset : slot.offset + slot.numel]


@given(shapes=SHAPES, bucket_bytes=st.integers(1, 400))
def test_every_tensor_is_found_by_its_index(shapes: list[tuple[int, str]], bucket_bytes: int) -> None:
    plan = planned(shapes, bucket_bytes)
    blocks = plan_blocks(plan, 3)
    assert [block.index for block in blocks] == list(range(len(shapes)))
    for block, (numel, dtype) in zip(blocks, shapes, strict=True):
        assert block.slot in plan[block.bucket].slots
        assert (block.slot.name, block.slot.numel) == (f"t{block.index}", numel)
        assert plan[block.bucket].dtype == dtype
