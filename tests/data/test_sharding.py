"""Which lane reads which shards: held against what the lanes have read, one sample after the other."""

import tracemalloc
from typing import Any

import numpy
from hypothesis import given
from hypothesis import strategies as st

from data.block_cases import Case, blocks_of_samples, cases, read_by, stream
from data.jobs import job
from quorate.data.block_sampler import BlockSampler, ReadCounts, sharding_at


def standing_of(parts: list[set[int]], begun: set[int], left: set[int]) -> ReadCounts:
    """Of things that hold these samples each, when `begun` may have been read and `left` must not."""
    counts = {"done": 0, "in_progress": 0, "untouched": 0, "left_out": 0}
    for samples in parts:
        if not samples & (begun | left):
            counts["left_out"] += 1
        elif not samples & left:
            counts["done"] += 1
        else:
            counts["in_progress" if samples & begun else "untouched"] += 1
    return ReadCounts(**counts)


@given(cases(), st.data())
def test_what_is_done_in_progress_and_untouched(case: Case, data: st.DataObject) -> None:
    """With windows of one sample a block is begun when its first sample is read; larger ones open what they hold."""
    records, _, keys = case
    order, of_sample = stream(records, 1, **keys), blocks_of_samples(records)
    shards = data.draw(st.integers(1, 4))
    shard_of_block = numpy.sort(
        numpy.array([data.draw(st.integers(0, shards - 1)) for _ in records], dtype=numpy.int64)
    )
    step = data.draw(st.integers(0, order.total_steps))
    found = sharding_at(order, shard_of_block, shards, step, {0: 7})
    epoch = max(0, order.epoch_of(step))
    assert (found.step, found.epoch) == (step, epoch)
    begun, left = set[int](), set[int]()
    for lane, reading in enumerate(found.lanes):
        used = read_by(order, lane, epoch)
        done, rest = used[: reading.samples_done], used[reading.samples_done :]
        assert (reading.lane, reading.worker) == (lane, 7 if lane == 0 else None)
        assert len(rest) == reading.samples_left
        unfinished = {of_sample[sample] for sample in rest}
        assert reading.blocks_left == len(unfinished)
        assert reading.blocks_done == len({of_sample[sample] for sample in used}) - len(unfinished)
        assert reading.block == (of_sample[rest[0]] if rest else None)
        assert reading.shard == (None if reading.block is None else shard_of_block[reading.block])
        assert reading.open_blocks == len(unfinished & {of_sample[sample] for sample in done})
        begun, left = begun | set(done), left | set(rest)
    assert (found.samples_done, found.samples_left) == (len(begun), len(left))
    in_block = [{sample for sample, of in enumerate(of_sample) if of == block} for block in range(len(records))]
    in_shard = [{s for s, of in enumerate(of_sample) if shard_of_block[of] == shard} for shard in range(shards)]
    assert found.blocks == standing_of(in_block, begun, left)
    assert found.shards == standing_of(in_shard, begun, left)
    assert found.shards.total == shards
    assert found.blocks.total == len(records)


def test_a_window_opens_the_blocks_that_it_lies_in() -> None:
    order = stream([4] * 12, 16, lanes=1, batch_size=4, epochs=1)
    shard_of_block = numpy.arange(12) // 3
    opened = [sharding_at(order, shard_of_block, 4, step, {0: 0}) for step in range(13)]
    assert [each.lanes[0].open_blocks for each in opened] == [0, 4, 4, 4, 0, 4, 4, 4, 0, 4, 4, 4, 0]
    assert [each.blocks.done for each in opened] == [0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12]
    assert opened[4].lanes[0].block == order.position(0, 0).blocks[4], "what is read next"
    assert opened[12].lanes[0].block is None


def test_a_hundred_thousand_shards_take_memory_of_their_blocks_only() -> None:
    """Three blocks each: an array of all three hundred million samples would take 2.4 GB."""
    blocks = 300_000
    spec: Any = job(lanes=16, batch_size=4096, epochs=3)
    order = BlockSampler(spec, numpy.full(blocks, 1000), 8192)
    shard_of_block = numpy.arange(blocks) // 3
    step = order.steps_per_epoch + order.steps_per_epoch // 2
    tracemalloc.start()
    try:
        found = sharding_at(order, shard_of_block, 100_000, step, {lane: lane // 4 for lane in range(16)})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.shards.total == 100_000
    # Half of the blocks are read, and three of a shard rarely stand together in the line.
    assert 10_000 < found.shards.done < 15_000
    assert found.shards.in_progress > 70_000
    assert 149_000 < found.blocks.done < 151_000
    assert found.samples_done == order.steps_per_epoch // 2 * 4096
    assert peak < 40_000_000, f"{peak:,} bytes"
