"""The order of a training set in blocks: each is read in one go, and no list of all samples is ever made.

Pure arithmetic, without torch. The order depends on no version of a library: it is made of additions, multiplications
and a sort of unequal numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy

from quorate.core.digests import derive_seed
from quorate.core.errors import TaskError
from quorate.core.user_code import given
from quorate.data.indices import NO_INDICES, Blocked, Indices, joined
from quorate.data.sampler import Sampler, refuse_short
from quorate.lanes.chunks import cut
from quorate.spec.job import JobSpec

# Splitmix64: the steps from state to state, and how a state is mixed.
_GOLDEN = numpy.uint64(0x9E3779B97F4A7C15)
_MIXING = (
    (numpy.uint64(30), numpy.uint64(0xBF58476D1CE4E5B9)),
    (numpy.uint64(27), numpy.uint64(0x94D049BB133111EB)),
)
_LAST_SHIFT = numpy.uint64(31)
# A loop reads at one step while its feed is some steps ahead; what a lane reads at a step may lie in two windows.
_WINDOWS_KEPT = 3


def records_of(dataset: Blocked, length: int) -> Indices:
    """The records of each block of a dataset with so many samples, checked."""
    try:
        records = numpy.asarray(dataset.blocks)
    except (TypeError, ValueError):
        records = numpy.asarray("")
    is_plain = records.ndim == 1 and (records.dtype.kind in "iu" or not len(records))
    if not is_plain or (len(records) and records.min() < 0):
        raise TaskError(
            f"The training set has `blocks` and `window`, so it is read block after block; but `blocks` is "
            f"{given(dataset.blocks)}. It must list how many records each block has, or have another name."
        )
    if (found := int(records.sum())) != length:
        raise TaskError(
            f"The blocks of the training set hold {found:,} records, but its len() is {length:,}: `blocks` must list "
            "how many records each block has, or have another name."
        )
    window = dataset.window
    if type(window) is not int or window < 1:
        raise TaskError(
            f"The window of the training set is {given(window)}: it must be a whole number of samples, at least 1."
        )
    return records.astype(numpy.int64)


def shuffle(count: int, seed: int) -> Indices:
    """A permutation of 0..count-1.

    By sorting random words. No two of them are equal, since they are mixed from unequal states by steps that can be
    undone; so every way to sort gives the same.
    """
    words = numpy.arange(count, dtype=numpy.uint64)
    words *= _GOLDEN
    words += numpy.uint64(seed)
    for shift, factor in _MIXING:
        words ^= words >> shift
        words *= factor
    words ^= words >> _LAST_SHIFT
    return numpy.argsort(words)


@dataclass(frozen=True)
class BlockOrder:
    """The blocks of an epoch in the order in which they are read; their records one after the other are its line.

    `starts` says where in the line each begins, and last where it ends. Blocks without records are left out.
    """

    blocks: Indices
    starts: Indices
    _shifts: Indices

    @classmethod
    def of(cls, records: Indices, seed: int) -> "BlockOrder":
        """Of blocks that hold so many records each; sample i is the i-th record of all blocks as they are numbered."""
        blocks = shuffle(len(records), seed)
        blocks = blocks[records[blocks] > 0]
        starts = numpy.zeros(len(blocks) + 1, dtype=numpy.int64)
        numpy.cumsum(records[blocks], out=starts[1:])
        firsts = numpy.cumsum(records) - records
        return cls(blocks, starts, firsts[blocks] - starts[:-1])

    def span(self, start: int, stop: int) -> range:
        """Which of `blocks` hold the places from start to before stop of the line."""
        if start >= stop:
            return range(0)
        first = int(numpy.searchsorted(self.starts, start, side="right")) - 1
        return range(first, int(numpy.searchsorted(self.starts, stop, side="left")))

    def samples(self, start: int, stop: int) -> Indices:
        span = self.span(start, stop)
        bounds = self.starts[span.start : span.stop + 1].clip(start, stop)
        shifts = numpy.repeat(self._shifts[span.start : span.stop], numpy.diff(bounds))
        return numpy.arange(start, max(start, stop), dtype=numpy.int64) + shifts


@dataclass(frozen=True)
class LanePosition:
    """Where a lane stands in its part of an epoch: `done` of its `samples` are read.

    `blocks` are those that it reads from, in order. The first `finished` of them are read to their end, as far as
    they are its own; those up to `begun` are being read from, a window at a time.
    """

    epoch: int
    samples: int
    done: int
    blocks: Indices
    finished: int
    begun: int


class BlockSampler(Sampler):
    """Every epoch shuffles the blocks; their records one after the other are a line, of which each lane reads a part.

    The part of a lane is as long as its shares of all steps together, and within it each window of samples is
    shuffled. So a lane reads its blocks one after the other and shares at most the first and the last with another.
    What `last_batch: drop` leaves out is the end of the line.
    """

    def __init__(self, spec: JobSpec, records: Indices, window: int, facts: Mapping[str, Any] | None = None) -> None:
        self.spec = spec
        self.window = window
        self.records = records
        self.samples = self.epoch_length = int(records.sum())
        self._facts = facts or {}
        self._order = lru_cache(maxsize=2)(
            lambda epoch: BlockOrder.of(records, derive_seed(spec.seed, "blocks", epoch))
        )
        self._window = lru_cache(maxsize=_WINDOWS_KEPT * spec.lanes)(self._window_of)
        refuse_short(spec, self.epoch_length)

    @classmethod
    def of(cls, spec: JobSpec, dataset: Blocked, length: int) -> "BlockSampler":
        """The order of a dataset that has so many samples. It may have `reading_facts`, which a run tells when it
        begins: where its blocks are listed, what waiting for it depends on; as JSON can hold them, without secrets."""
        facts = getattr(dataset, "reading_facts", None)
        return cls(spec, records_of(dataset, length), dataset.window, facts)

    def describe(self) -> dict[str, Any]:
        return {"data": {"blocks": len(self.records), "window": self.window, **self._facts}}

    def part(self, lane: int) -> range:
        """The places in the line, the same in every epoch, that a lane reads."""
        # How many whole batches an epoch has, and how many samples the incomplete one, if the job keeps it.
        whole, rest = divmod(self.samples, self.spec.batch_size)
        rest = rest if self.spec.last_batch == "keep" else 0
        of_whole, of_rest = cut(self.spec.batch_size, self.spec.lanes)[lane], cut(rest, self.spec.lanes)[lane]
        return range(of_whole.start * whole + of_rest.start, of_whole.stop * whole + of_rest.stop)

    def share(self, step: int, lane: int) -> Indices:
        epoch, before, size = self.epoch_of(step), (step - 1) % self.steps_per_epoch, self.window
        start, stop = self._done(before, lane), self._done(before + 1, lane)
        if start >= stop:
            return NO_INDICES
        if size == 1:
            begin = self.part(lane).start
            return self._order(epoch).samples(begin + start, begin + stop)
        numbers = range(start // size, -(-stop // size))
        return joined([self._window(epoch, lane, n)[max(start - n * size, 0) : stop - n * size] for n in numbers])

    def dropped(self, epoch: int) -> Indices:
        return self._order(epoch).samples(self.part(self.spec.lanes - 1).stop, self.samples)

    def position(self, step: int, lane: int) -> LanePosition:
        """Where a lane stands after a step, in the epoch of that step; after step 0 at the beginning."""
        epoch = self.epoch_of(max(step, 1))
        done, part, order = self._done(step - epoch * self.steps_per_epoch, lane), self.part(lane), self._order(epoch)
        # The window that the lane is in; where one ends and none has begun, it is empty.
        begin = done // self.window * self.window
        end = begin if begin == done else min(begin + self.window, len(part))
        span = order.span(part.start, part.stop)
        finished, begun = len(span), len(span)
        if done < len(part):
            finished = int(numpy.searchsorted(order.starts, part.start + begin, side="right")) - 1 - span.start
            begun = int(numpy.searchsorted(order.starts, part.start + end, side="left")) - span.start if done else 0
        return LanePosition(epoch, len(part), done, order.blocks[span.start : span.stop], finished, begun)

    def _done(self, steps: int, lane: int) -> int:
        """How many samples a lane has read after so many steps of an epoch."""
        of_batch = cut(self.spec.batch_size, self.spec.lanes)[lane]
        each: int = of_batch.stop - of_batch.start
        return min(steps * each, len(self.part(lane)))

    def _window_of(self, epoch: int, lane: int, number: int) -> Indices:
        part = self.part(lane)
        start = part.start + number * self.window
        samples = self._order(epoch).samples(start, min(start + self.window, part.stop))
        return samples[shuffle(len(samples), derive_seed(self.spec.seed, "window", epoch, lane, number))]


# --- which lane reads which shards, and how far it is: a pure function of the order, the step and who hosts what

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
