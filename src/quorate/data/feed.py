"""The stream of batches that a worker reads, fetched ahead in loader processes or, with none, just in time."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import islice

import torch

from quorate.core.errors import HelperLost, JobError
from quorate.core.failure import name_samples
from quorate.data.loader import Asked, Loader
from quorate.data.prefetch import BlockPrefetch, LoaderAssignment
from quorate.data.sampler import Request, Source
from quorate.data.samples import Batch, FetchFailure, Samples, batch_of
from quorate.data.shards.dataset import Shards
from quorate.data.shards.threads import CHECK_EVERY, HelperThreads, interruptible

_GRACE = 0.05
Pending = Future[Batch | FetchFailure]


class Feed:
    """Batches in the order of a reading plan, which so many `lanes` read.

    User code never runs in a thread: one that draws from a global generator would race with the lane that is computing.
    Blocks of shards are read ahead by threads, which run nothing but Quorate's own code. Whoever waits for data calls
    `check` now and then; what that raises ends the waiting.
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
    ) -> None:
        self._samples = samples
        # Loaders are for the code of the task. Batches of columns need none of it, and are made faster here, or by a
        # thread, than they come from another process.
        self._loader_workers = 0 if samples.columns.keys() == samples.datasets.keys() else loader_workers
        # Of tensors in memory there is nothing to read ahead, nothing to wait for, and nothing that may go wrong.
        self._in_memory = {} if self._loader_workers or samples.shards else samples.columns
        self._prefetch = prefetch
        self._check = check
        self._loaders: list[Loader] = []
        self._ahead: Iterator[Asked] | None = None
        self._planned: deque[tuple[Request, Pending | None]] = deque()
        if self._loader_workers:
            self._start_loaders(requests, lanes)
        elif samples.shards:
            samples.divide_memory(1)
            self._ahead = iter(BlockPrefetch(requests, samples.shards, behind=prefetch))
            # It makes batches of columns ahead: for these no code of the task runs, and nothing is drawn.
            self._batch_thread = HelperThreads("batch-maker", most=1)
        # Loader processes compute with one thread, so fetching in this process does too: same bits either way.
        self._threads = threads if self._loader_workers == 0 and threads > 1 else None

    def _start_loaders(self, requests: Iterator[Request], lanes: int) -> None:
        samples, count = self._samples, self._loader_workers
        if not samples.shards:
            # Whoever reads sample by sample keeps nothing from one request to the next, whatever its lane.
            assignment = LoaderAssignment(requests, count, 1, 1, by_lane=False)
        else:
            # Batches of columns are made of whole blocks: a second loader of a lane would only open them a second time.
            count = min(count, lanes) if Source.TRAINING in samples.columns else count
            assignment = LoaderAssignment(requests, count, lanes, self._prefetch)
            samples.divide_memory(count)
        self._assignment = assignment
        try:
            for loader in range(count):
                asked: Iterator[Asked] = ((request, None) for request in assignment.requests(loader))
                if samples.shards:
                    asked = iter(BlockPrefetch(assignment.requests(loader), samples.shards))
                self._loaders.append(Loader(samples, asked, self._prefetch))
        except BaseException:
            Loader.end(self._loaders)
            raise

    def next(self, expected: Request) -> Batch:
        """The batch that answers `expected`, which must be the next request of the plan."""
        if (columns := self._in_memory.get(expected.source)) is not None:
            return Batch(expected, columns.batch(expected.numbers))
        answer = self._take(expected) if self._loader_workers else self._read(expected)
        if answer.request != expected:
            raise AssertionError(f"The feed gave {answer.request} where the loop expected {expected}.")
        batch, noted = batch_of(answer), self._samples.noted
        if not batch.notes:
            return batch
        new = tuple(note for note in dict.fromkeys(batch.notes) if note not in noted)
        noted.update(new)
        return replace(batch, notes=new)

    def _read(self, request: Request) -> Batch | FetchFailure:
        if self._ahead is not None:
            request, pending = self._next_planned()
            if pending is not None:
                while not pending.done():
                    try:
                        pending.exception(CHECK_EVERY)
                    except TimeoutError:
                        self._check()
                        if not self._batch_thread.is_alive and not pending.done():
                            raise JobError("The thread that puts batches together is gone.") from None
                return pending.result()
        if self._threads is not None:
            torch.set_num_threads(1)
        try:
            with interruptible(self._check):
                return self._samples[request]
        finally:
            if self._threads is not None:
                torch.set_num_threads(self._threads)

    def _next_planned(self) -> tuple[Request, Pending | None]:
        """The next request, and its batch if that is made ahead; the plan itself is never run by a thread."""
        assert self._ahead is not None
        for request, blocks in islice(self._ahead, 1 + self._prefetch - len(self._planned)):
            if blocks is not None:
                self._samples.prefetch(blocks)
            is_made_ahead = isinstance(self._samples.columns.get(request.source), Shards)
            make = partial(self._samples.__getitem__, request)
            self._planned.append((request, self._batch_thread.submit(make) if is_made_ahead else None))
        return self._planned.popleft()

    def _take(self, request: Request) -> Batch | FetchFailure:
        try:
            return self._loaders[self._assignment.next_loader()].take(request, self._check)
        except HelperLost as error:
            samples = f"{name_samples(request.indices)} of the {request.source.value} set"
            raise HelperLost(f"{error.message} It was to read {samples}.") from None

    def close(self) -> None:
        """End the loader processes, and read nothing ahead any more; what is still being read is not waited for."""
        Loader.end(self._loaders)
        self._loaders = []
        if self._ahead is not None:
            self._batch_thread.close(_GRACE)
            self._samples.prefetch({})
