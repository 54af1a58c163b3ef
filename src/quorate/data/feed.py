"""The stream of batches that a worker reads, fetched ahead in loader processes or, with none, just in time."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy
import torch

from quorate.core.errors import HelperLost, JobError, UserCodeError
from quorate.core.failure import name_samples
from quorate.core.user_code import with_hint
from quorate.data.indices import Indices
from quorate.data.loader import Loader
from quorate.data.prefetch import BatchThread, BlockPrefetch, Expected, LoaderAssignment, PendingBatch
from quorate.data.sampler import Request, Source
from quorate.data.samples import Fetched, FetchFailure, Samples
from quorate.data.shards.threads import hearing


@dataclass(frozen=True)
class Batch:
    """A batch, the samples that are in it, and the bad ones that were left out, of the first of which `why` tells what
    is wrong; without samples it has no content. `notes` are what its reading met with and was not told before; `draws`:
    random numbers are drawn for samples of this set."""

    content: Any
    samples: Indices
    bad: tuple[int, ...] = ()
    why: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    draws: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether all of its samples are bad."""
        return not len(self.samples)


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
        self._loader_workers = 0 if all(map(samples.is_columns, samples.datasets)) else loader_workers
        # Of tensors in memory there is nothing to read ahead, nothing to wait for, and nothing that may go wrong.
        self._in_memory = {} if self._loader_workers or samples.shards else samples.in_memory
        self._prefetch = prefetch
        self._check = check
        self._dealer: LoaderAssignment | None = None
        self._loaders: list[Loader] = []
        self._looking: Iterator[tuple[Request, Expected | None]] | None = None
        self._planned: deque[tuple[Request, PendingBatch | None]] = deque()
        try:
            self._begin(requests, lanes)
        except BaseException:
            Loader.end(self._loaders)
            raise
        # Loader processes compute with one thread, so fetching in this process does too: same bits either way.
        self._threads = threads if self._loader_workers == 0 and threads > 1 else None

    def _begin(self, requests: Iterator[Request], lanes: int) -> None:
        shards = self._samples.shards
        if not shards:
            if self._loader_workers:
                self._loaders.append(Loader(self._samples, requests, self._loader_workers, self._prefetch))
            return
        if not self._loader_workers:
            self._samples.divide_memory(1)
            self._looking = iter(BlockPrefetch(requests, shards, behind=self._prefetch))
            self._assembler = BatchThread(self._samples)
            return
        # Batches of columns are made of whole blocks: a second loader of a lane would only open them a second time.
        most = lanes if self._samples.is_columns(Source.TRAINING) else self._loader_workers
        dealer = LoaderAssignment(requests, min(self._loader_workers, most), lanes, self._prefetch)
        self._dealer = dealer
        self._samples.divide_memory(dealer.loaders)
        for loader in range(dealer.loaders):
            plan = iter(BlockPrefetch(dealer.requests(loader), shards))
            self._loaders.append(Loader(_Told(self._samples), plan, 1, self._prefetch))

    def next(self, expected: Request) -> Batch:
        """The batch that answers `expected`, which must be the next request of the plan."""
        if (columns := self._in_memory.get(expected.source)) is not None:
            return Batch(columns.batch(expected.numbers), expected.numbers)
        answer = self._read(expected) if not self._loader_workers else self._take(expected)
        if answer.request != expected:
            raise AssertionError(f"The feed gave {answer.request} where the loop expected {expected}.")
        batch = batch_of(answer)
        return replace(batch, notes=self._samples.news(batch.notes)) if batch.notes else batch

    def _read(self, request: Request) -> Fetched | FetchFailure:
        if self._looking is None:
            return self._fetch(request)
        planned, assembly = self._next_planned(self._looking)
        if assembly is not None:
            return self._assembler.take(assembly, self._check)
        with hearing(self._check):
            return self._fetch(planned)

    def _fetch(self, request: Request) -> Fetched | FetchFailure:
        if self._threads is None:
            return self._samples[request]
        torch.set_num_threads(1)
        try:
            return self._samples[request]
        finally:
            torch.set_num_threads(self._threads)

    def _next_planned(self, looking: Iterator[tuple[Request, Expected | None]]) -> tuple[Request, PendingBatch | None]:
        """The next request, and its batch if that is put together ahead; the plan itself is never run by a thread."""
        for request, blocks in islice(looking, 1 + self._prefetch - len(self._planned)):
            if blocks is not None:
                self._samples.expect(blocks)
            ahead = request.source in self._samples.shards and self._samples.is_columns(request.source)
            self._planned.append((request, self._assembler.begin(request) if ahead else None))
        return self._planned.popleft()

    def _take(self, request: Request) -> Fetched | FetchFailure:
        try:
            return self._loaders[0 if self._dealer is None else self._dealer.next_loader()].take(request, self._check)
        except HelperLost as error:
            samples = f"{name_samples(request.indices)} of the {request.source.value} set"
            raise HelperLost(f"{error.message} It was to read {samples}.") from None

    def close(self) -> None:
        """End the loader processes, and read nothing ahead any more; what is still being read is not waited for."""
        Loader.end(self._loaders)
        self._loaders = []
        if self._looking is not None:
            self._assembler.close()
            self._samples.expect({})


class _Told:
    """What a loader of shards reads from: it is told of the blocks to come along with a request."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __getitem__(self, told: tuple[Request, Expected | None]) -> Fetched | FetchFailure:
        request, blocks = told
        if blocks is not None:
            self._samples.expect(blocks)
        return self._samples[request]


def batch_of(answer: Fetched | FetchFailure) -> Batch:
    """The batch; what was in the way of it is raised here."""
    if isinstance(answer, Fetched):
        samples = answer.request.numbers
        if answer.bad:
            samples = samples[~numpy.isin(samples, answer.bad)]
        return Batch(answer.batch, samples, answer.bad, answer.why, answer.notes, answer.draws)
    source = answer.request.source.value
    where = "collate()" if answer.index is None else f"sample {answer.index} of the {source} set"
    if answer.kind == "access" or (answer.kind == "sample" and not answer.traceback):
        where = f"the {source} set" if answer.index is None else where
        raise JobError(with_hint(f"{where} cannot be read: {answer.message}", answer.hint))
    raise UserCodeError(with_hint(f"{answer.message} (in {where})", answer.hint), answer.traceback)
