"""The order of a training set in blocks: each is read in one go, and no list of all samples is ever made."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy

from quorate.core.addresses import has_secret, shown
from quorate.core.seeds import derive_seed
from quorate.data.block_order import BlockOrder, shuffle
from quorate.data.blocked import Blocked, Described, Indexed, records_of
from quorate.data.indices import NO_INDICES, Indices
from quorate.data.sample_order import SampleOrder
from quorate.lanes.chunks import cut
from quorate.spec.job import JobSpec

# A loop reads at one step while its feed is some steps ahead; what a lane reads at a step may lie in two windows.
_WINDOWS_KEPT = 3


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


class StreamSampler(SampleOrder):
    """Every epoch shuffles the blocks; their records one after the other are a line, of which each lane reads a part.

    The part of a lane is as long as its shares of all steps together, and within it each window of samples is
    shuffled. So a lane reads its blocks one after the other and shares at most the first and the last with another.
    What `last_batch: drop` leaves out is the end of the line.
    """

    def __init__(self, spec: JobSpec, records: Indices, window: int, index: Mapping[str, Any] | None = None) -> None:
        self.spec = spec
        self.window = window
        self.records = records
        self.samples = self.epoch_length = int(records.sum())
        self._index = index
        self._order = lru_cache(maxsize=2)(self._order_of)
        self._window = lru_cache(maxsize=_WINDOWS_KEPT * spec.lanes)(self._window_of)
        self.check_trainable("The training set")

    @classmethod
    def of(cls, spec: JobSpec, dataset: Blocked, length: int) -> "StreamSampler":
        """The order of a dataset that has so many samples."""
        index: dict[str, Any] = {"reading": dataset.reading_facts} if isinstance(dataset, Described) else {}
        if isinstance(dataset, Indexed):
            # It is told in the events of the run, which others may read.
            path = shown(dataset.index_path) if has_secret(dataset.index_path) else dataset.index_path
            index |= {"index": path, "digest": dataset.index_digest}
        return cls(spec, records_of(dataset, length), dataset.window, index)

    def describe(self) -> dict[str, Any]:
        """How many blocks there are, how they are shuffled, and where they are listed."""
        return {"data": {"blocks": len(self.records), "window": self.window, **(self._index or {})}}

    def order(self, epoch: int) -> BlockOrder:
        """The line of an epoch."""
        return self._order(epoch)

    def part(self, lane: int) -> range:
        """The places in the line, the same in every epoch, that a lane reads."""
        whole, rest = self._whole_and_rest()
        of_whole, of_rest = cut(self.spec.batch_size, self.spec.lanes)[lane], cut(rest, self.spec.lanes)[lane]
        return range(of_whole.start * whole + of_rest.start, of_whole.stop * whole + of_rest.stop)

    def share(self, step: int, lane: int) -> Indices:
        """Indices of a lane's part of a batch, in order."""
        start, stop = (self._done(done, lane) for done in self._steps_around(step))
        return self._read(self.epoch_of(step), lane, start, stop)

    def dropped(self, epoch: int) -> Indices:
        """What `last_batch: drop` leaves out of an epoch, in order."""
        return self._order(epoch).samples(self.part(self.spec.lanes - 1).stop, self.samples)

    def blocks_of(self, epoch: int, lane: int) -> Indices:
        """The blocks that a lane reads from in an epoch, in order."""
        part, order = self.part(lane), self._order(epoch)
        span = order.span(part.start, part.stop)
        return order.blocks[span.start : span.stop]

    def position(self, step: int, lane: int) -> LanePosition:
        """Where a lane stands after a step, in the epoch of that step; after step 0 at the beginning."""
        epoch = self.epoch_of(max(step, 1))
        done, part, order = self._done(step - epoch * self.steps_per_epoch, lane), self.part(lane), self._order(epoch)
        begin, end = self._window_around(done, len(part))
        span = order.span(part.start, part.stop)
        finished, begun = len(span), len(span)
        if done < len(part):
            finished = int(numpy.searchsorted(order.starts, part.start + begin, side="right")) - 1 - span.start
            begun = int(numpy.searchsorted(order.starts, part.start + end, side="left")) - span.start if done else 0
        return LanePosition(epoch, len(part), done, order.blocks[span.start : span.stop], finished, begun)

    def _whole_and_rest(self) -> tuple[int, int]:
        """How many whole batches an epoch has, and how many samples the incomplete one, if the job keeps it."""
        whole, rest = divmod(self.samples, self.spec.batch_size)
        return whole, rest if self.spec.last_batch == "keep" else 0

    def _steps_around(self, step: int) -> tuple[int, int]:
        """How many steps of its epoch are done before a step, and after it."""
        before = (step - 1) % self.steps_per_epoch
        return before, before + 1

    def _done(self, steps: int, lane: int) -> int:
        """How many samples a lane has read after so many steps of an epoch."""
        of_batch = cut(self.spec.batch_size, self.spec.lanes)[lane]
        each: int = of_batch.stop - of_batch.start
        return min(steps * each, len(self.part(lane)))

    def _window_around(self, done: int, length: int) -> tuple[int, int]:
        """Where the window begins and ends that a lane is in; where one ends and none has begun, both are there."""
        begin = done // self.window * self.window
        return begin, begin if begin == done else min(begin + self.window, length)

    def _read(self, epoch: int, lane: int, start: int, stop: int) -> Indices:
        """What stands from start to before stop in a lane's part, its windows shuffled."""
        if start >= stop:
            return NO_INDICES
        if self.window == 1:
            begin = self.part(lane).start
            return self._order(epoch).samples(begin + start, begin + stop)
        size = self.window
        numbers = range(start // size, -(-stop // size))
        parts = [self._window(epoch, lane, n)[max(start - n * size, 0) : stop - n * size] for n in numbers]
        return parts[0] if len(parts) == 1 else numpy.concatenate(parts)

    def _window_of(self, epoch: int, lane: int, number: int) -> Indices:
        part = self.part(lane)
        start = part.start + number * self.window
        samples = self._order(epoch).samples(start, min(start + self.window, part.stop))
        return samples[shuffle(len(samples), derive_seed(self.spec.seed, "window", epoch, lane, number))]

    def _order_of(self, epoch: int) -> BlockOrder:
        return BlockOrder.of(self.records, derive_seed(self.spec.seed, "blocks", epoch))
