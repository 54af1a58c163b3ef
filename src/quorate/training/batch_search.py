"""The largest micro-batch that fits into memory (`batch_size: auto`): tried out on real samples, before the first step.

It runs in a job of its own that is thrown away: what it does to weights, buffers and the optimizer's state is lost.
"""

import logging
import resource
from collections.abc import Callable
from dataclasses import dataclass

import numpy

from quorate.core.errors import JobError, LossError
from quorate.core.machine import free_memory
from quorate.data.feed import Feed
from quorate.data.sampler import Request, Sampler, Source
from quorate.replica.device import Device
from quorate.spec.job import JobSpec
from quorate.task.hints import out_of_memory, what_needs_less_memory
from quorate.training.lane import LaneRunner
from quorate.training.strategy import NOTHING_ASKED, Strategy

log = logging.getLogger(__name__)

MOST_ON_HOST = 256
"""Samples at a time beyond which a CPU gains nothing, however much memory there is."""
MOST = 2**14
_ROOM = 0.8
"""Of what is free: the rest is for what a step of several workers needs besides."""


def largest_that_fits(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, found by doubling and then by halving what is in doubt to an eighth;
    0 if not even one does. It begins with two where it may: one sample has no variance for batch norm."""
    size = min(2, most)
    if not fits(size):
        return 1 if size > 1 and fits(1) else 0
    largest, failed = size, None
    while failed is None and largest < most:
        size = min(2 * largest, most)
        if fits(size):
            largest = size
        else:
            failed = size
    while failed is not None and failed - largest > max(1, largest // 8):
        size = (largest + failed) // 2
        if fits(size):
            largest = size
        else:
            failed = size
    return largest


@dataclass
class BatchSearch:
    """Tries micro-batches in lane 0 of a worker that is alone. `sharing` workers have the memory between them."""

    spec: JobSpec
    sampler: Sampler
    feed: Feed
    lanes: LaneRunner
    strategy: Strategy
    device: Device
    _tried: int = 0
    _before: int = 0
    _limit: float = 0.0

    def run(self, sharing: int) -> int:
        """How many samples at a time fit."""
        spec = self.spec
        most = min(MOST, self.sampler.epoch_length // (spec.lanes * spec.accumulate))
        if self.device.is_host:
            most = min(most, MOST_ON_HOST)
            self._before = _peak_memory()
            self._limit = self._before + _ROOM * free_memory() / sharing
        else:
            self.device.limit_memory(_ROOM / sharing)
        found = largest_that_fits(self._fits, max(1, most))
        if not found:
            raise JobError(
                f"batch_size: auto finds no batch: memory runs out with one sample. {what_needs_less_memory(spec)}"
            )
        return found

    def _fits(self, size: int) -> bool:
        if self.device.is_host and not self._is_expected_to_fit(size):
            return False
        does_fit = True
        try:
            self._try_step(size)
        except LossError:  # what was only tried may well diverge
            pass
        except Exception as error:
            if out_of_memory(error) is None:
                raise
            does_fit = False
        if not does_fit:
            self.lanes.abandon(0)
            self.device.free_unused()
        self._tried = max(self._tried, size)
        log.info("%d samples at a time %s", size, "fit" if does_fit else "do not fit")
        return does_fit

    def _is_expected_to_fit(self, size: int) -> bool:
        """Nobody is told that the host's memory runs out; whoever uses too much is killed. What a step takes grows with
        its samples."""
        if not self._tried:
            return True
        grown = max(0, _peak_memory() - self._before)
        return self._before + grown * size / self._tried <= self._limit

    def _try_step(self, size: int) -> None:
        """A whole step, with its update: optimizers take memory at their first."""
        strategy, samples = self.strategy, numpy.arange(size, dtype=numpy.int64) % self.sampler.samples
        self.lanes.watch.settings.begin()
        batch = self.feed.next(Request(Source.TRAINING, 0, samples))
        strategy.begin(1)
        others = [lane for lane in strategy.hosted if lane]
        results = [self.lanes.run(1, 0, [(size, batch.content)], size)]
        results += [self.lanes.run(1, lane, (), size) for lane in others]
        self.lanes.read(results)
        strategy.advance(1, results, NOTHING_ASKED)


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
