"""Which lane reads which shards, and how far it is: a pure function of the order, the step and who hosts what."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy

from quorate.data.block_sampler import BlockSampler, LanePosition
from quorate.data.indices import Indices

Counts = numpy.ndarray[tuple[int], numpy.dtype[numpy.intp]]


@dataclass(frozen=True)
class ReadCounts:
    """How many shards, or blocks, stand how in an epoch. `left_out` are those of which it reads nothing: what they
    hold is dropped, or they are empty."""

    done: int
    in_progress: int
    untouched: int
    left_out: int

    @property
    def total(self) -> int:
        return self.done + self.in_progress + self.untouched + self.left_out


@dataclass(frozen=True)
class LaneReading:
    """What a lane reads in the epoch. `block` and `shard` are what it reads from, or reads next, by number; None where
    all is read. A window may lie in several blocks: `open_blocks` are begun and not done, and this is the first."""

    lane: int
    worker: int | None
    shard: int | None
    block: int | None
    open_blocks: int
    blocks_done: int
    blocks_left: int
    samples_done: int
    samples_left: int


@dataclass(frozen=True)
class Sharding:
    """How a training set in shards is divided among the lanes, and how much of it is read, after a step."""

    step: int
    epoch: int
    lanes: tuple[LaneReading, ...]
    blocks: ReadCounts
    shards: ReadCounts

    @property
    def samples_done(self) -> int:
        return sum(lane.samples_done for lane in self.lanes)

    @property
    def samples_left(self) -> int:
        return sum(lane.samples_left for lane in self.lanes)


def sharding_at(
    order: BlockSampler, shard_of_block: Indices, shards: int, step: int, hosts: Mapping[int, int]
) -> Sharding:
    """What `hosts`, the worker of each lane, read after a step; in time and memory of the number of blocks."""
    positions = [order.position(step, lane) for lane in range(order.spec.lanes)]
    # In how many parts each block is read, since two lanes may share it; how many are begun, and finished.
    read, begun, finished = (numpy.zeros(len(order.records), dtype=numpy.intp) for _ in range(3))
    for position in positions:  # no block twice in one lane, so plain sums see every part
        read[position.blocks] += 1
        begun[position.blocks[: position.begun]] += 1
        finished[position.blocks[: position.finished]] += 1
    block_states = read > 0, begun > 0, (read > 0) & (finished == read)
    shard_states = [numpy.bincount(shard_of_block[state], minlength=shards) for state in block_states]
    return Sharding(
        step=step,
        epoch=positions[0].epoch,
        lanes=tuple(
            _reading(lane, hosts.get(lane), position, shard_of_block) for lane, position in enumerate(positions)
        ),
        blocks=_counts(*(state.astype(numpy.intp) for state in block_states)),
        shards=_counts(*shard_states),
    )


def _counts(read: Counts, begun: Counts, done: Counts) -> ReadCounts:
    """Of things of which so much is read in the epoch, begun and done."""
    is_read, is_done, is_begun = read > 0, (read > 0) & (done == read), begun > 0
    counts = (is_done, is_begun & ~is_done, is_read & ~is_begun, ~is_read)
    return ReadCounts(*(int(numpy.count_nonzero(which)) for which in counts))


def _reading(lane: int, worker: int | None, position: LanePosition, shard_of_block: Indices) -> LaneReading:
    has_more = position.finished < len(position.blocks)
    block = int(position.blocks[position.finished]) if has_more else None
    return LaneReading(
        lane=lane,
        worker=worker,
        shard=None if block is None else int(shard_of_block[block]),
        block=block,
        open_blocks=position.begun - position.finished,
        blocks_done=position.finished,
        blocks_left=len(position.blocks) - position.finished,
        samples_done=position.done,
        samples_left=position.samples - position.done,
    )
