"""The stream of batches that a worker reads, fetched ahead in loader processes or, with none, just in time."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Protocol

import torch

from quorate.data.datasets import Room
from quorate.data.sampler import Request
from quorate.data.samples import Batch, FetchFailure, Samples, batch_of


class _Reader(Protocol):
    """Reads ahead. What it has not read yet when it is closed is not waited for."""

    def take(self, request: Request, check: Callable[[], None]) -> Batch | FetchFailure: ...

    def close(self) -> None: ...


class Feed:
    """Batches in the order of a reading plan, which so many `lanes` read.

    User code never runs in a thread: one that draws from a global generator would race with the lane that is computing.
    Blocks of shards are read ahead by threads, which run nothing but Quorate's own code. Whoever waits for data calls
    `check` now and then; what that raises ends the waiting. Unless it `is_planned`, there is no plan, and everything is
    read just in time. `room` is memory of the host that batches are sent to a device from.
    """

    def __init__(
        self,
        samples: Samples,
        requests: Iterator[Request],
        loader_workers: int,
        threads: int,
        prefetch: int = 2,
        *,
        lanes: int = 1,
        check: Callable[[], None] = lambda: None,
        is_planned: bool = True,
        room: Room | None = None,
    ) -> None:
        self._samples = samples
        self._room = room if is_planned else None
        # Where nobody knows what is read next, nothing is read ahead.
        loader_workers = loader_workers if is_planned else 0
        # Loaders are for the code of the task. Batches of columns need none of it, and are made faster here, or by a
        # thread, than they come from another process.
        self._loader_workers = 0 if samples.columns.keys() == samples.datasets.keys() else loader_workers
        # Of tensors in memory there is nothing to read ahead, nothing to wait for, and nothing that may go wrong. But
        # what is sent to a device is copied to memory that it reads fast, while the device computes.
        self._is_made_ahead = bool(samples.shards or (self._room and samples.columns)) and is_planned
        self._in_memory = {} if self._loader_workers or self._is_made_ahead else samples.columns
        self._prefetch = prefetch
        self._check = check
        self._lanes = lanes
        # Loader processes compute with one thread, so fetching in this process does too: same bits either way.
        self._threads = threads if self._loader_workers == 0 and threads > 1 else None
        self._begin(requests)

    def _begin(self, requests: Iterator[Request]) -> None:
        self._reader: _Reader | None = None
        # A job that needs neither imports neither.
        if self._loader_workers:
            from quorate.data.loader import Loaders

            self._reader = Loaders(self._samples, requests, self._loader_workers, self._lanes, self._prefetch)
        elif self._is_made_ahead:
            from quorate.data.prefetch import BatchesAhead

            self._reader = BatchesAhead(self._samples, requests, self._prefetch, self._room, self._read)

    def begin_again(self, requests: Iterator[Request]) -> None:
        """Follow another plan from now on; what was read ahead by the old one is dropped."""
        self.close()
        self._begin(requests)

    def next(self, expected: Request) -> Batch:
        """The batch that answers `expected`, which must be the next request of the plan."""
        if (columns := self._in_memory.get(expected.source)) is not None:
            return Batch(expected, columns.batch(expected.numbers))
        answer = self._read(expected) if self._reader is None else self._reader.take(expected, self._check)
        if answer.request != expected:
            raise AssertionError(f"The feed gave {answer.request} where the loop expected {expected}.")
        batch, noted = batch_of(answer), self._samples.noted
        if not batch.notes:
            return batch
        new = tuple(note for note in dict.fromkeys(batch.notes) if note not in noted)
        noted.update(new)
        return replace(batch, notes=new)

    def _read(self, request: Request) -> Batch | FetchFailure:
        if self._threads is not None:
            torch.set_num_threads(1)
        try:
            with self._interruptible():
                return self._samples[request]
        finally:
            if self._threads is not None:
                torch.set_num_threads(self._threads)

    def _interruptible(self) -> AbstractContextManager[None]:
        if not self._samples.shards:
            return nullcontext()
        from quorate.data.threads import interruptible

        return interruptible(self._check)

    def close(self) -> None:
        """End the loader processes, and read nothing ahead any more; what is still being read is not waited for."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
