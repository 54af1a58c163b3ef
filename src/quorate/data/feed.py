"""The stream of batches that a worker reads, fetched ahead in loader processes or, with none, just in time."""

import gc
import os
import signal
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from quorate.core.errors import JobError, UserCodeError
from quorate.core.processes import die_with_parent
from quorate.core.user_code import describe, user_traceback, with_hint
from quorate.data.assembler import Assembler, Assembly
from quorate.data.lookahead import Dealer, Expected, Lookahead
from quorate.data.reading import Request
from quorate.data.samples import Fetched, FetchTrouble, Samples


class _Plan(Sampler[Any]):
    def __init__(self, plan: Iterator[Any]) -> None:
        self._plan = plan

    def __iter__(self) -> Iterator[Any]:
        return self._plan


@dataclass(frozen=True)
class Batch:
    """A batch, the samples that are in it, and the bad ones that were left out; without samples it has no content."""

    content: Any
    samples: tuple[int, ...]
    bad: tuple[int, ...] = ()


class Feed:
    """Batches in the order of a reading plan.

    User code never runs in a thread: one that draws from a global generator would race with the lane that is computing.
    Blocks of shards are read ahead by threads, which run nothing but Quorate's own code.
    """

    def __init__(
        self, samples: Samples, requests: Iterator[Request], loader_workers: int, threads: int, prefetch: int = 2
    ) -> None:
        self._samples = samples
        self._loader_workers = loader_workers
        self._dealer: Dealer | None = None
        self._loaded: list[Iterator[bytes]] = []
        self._looking: Iterator[tuple[Request, Expected | None]] | None = None
        self._planned: deque[tuple[Request, Assembly | None]] = deque()
        if samples.shards:
            self._begin_ahead(requests, prefetch)
        elif loader_workers:
            self._loaded = [_loading(samples, requests, loader_workers, prefetch)]
        # Loader processes compute with one thread, so fetching in this process does too: same bits either way.
        self._threads = threads if loader_workers == 0 and threads > 1 else None

    def _begin_ahead(self, requests: Iterator[Request], prefetch: int) -> None:
        shards = self._samples.shards
        if not self._loader_workers:
            self._samples.divide_memory(1)
            self._looking = iter(Lookahead(requests, shards, behind=prefetch))
            self._prefetch = prefetch
            self._assembler = Assembler(self._samples)
            return
        self._dealer = dealer = Dealer(requests, self._loader_workers)
        self._samples.divide_memory(dealer.loaders)
        for loader in range(dealer.loaders):
            plan = iter(Lookahead(dealer.requests(loader), shards))
            self._loaded.append(_loading(_Told(self._samples), plan, 1, prefetch))

    def next(self, expected: Request) -> Batch:
        """The batch that answers `expected`, which must be the next request of the plan."""
        answer = self._read(expected) if not self._loader_workers else self._take(expected)
        if answer.request != expected:
            raise AssertionError(f"The feed gave {answer.request} where the loop expected {expected}.")
        return batch_of(answer)

    def _read(self, request: Request) -> Fetched | FetchTrouble:
        if self._looking is not None:
            planned, assembly = self._next_planned(self._looking)
            if planned != request:
                raise AssertionError(f"The plan has {planned} where the loop expected {request}.")
            if assembly is not None:
                return self._assembler.take(assembly)
        if self._threads is None:
            return self._samples[request]
        torch.set_num_threads(1)
        try:
            return self._samples[request]
        finally:
            torch.set_num_threads(self._threads)

    def _next_planned(self, looking: Iterator[tuple[Request, Expected | None]]) -> tuple[Request, Assembly | None]:
        """The next request, and its batch if that is put together ahead; the plan itself is never run by a thread."""
        for request, blocks in islice(looking, 1 + self._prefetch - len(self._planned)):
            if blocks is not None:
                self._samples.expect(blocks)
            ahead = self._samples.is_columns(request.source)
            self._planned.append((request, self._assembler.begin(request) if ahead else None))
        return self._planned.popleft()

    def _take(self, request: Request) -> Fetched | FetchTrouble:
        loaded = self._loaded[0 if self._dealer is None else self._dealer.loader_of(request)]
        try:
            with _child_signals_kept():
                signal.signal(signal.SIGCHLD, _tell_of_death)
                _tell_of_death()
                answer = next(loaded)
            return ForkingPickler.loads(answer)  # type: ignore[no-any-return]
        except (RuntimeError, OSError, EOFError) as error:
            # User code cannot raise here, so it is the loader itself: a process that died, memory that ran out. One
            # that dies after it has answered takes the memory of its answer along.
            raise JobError(
                f"A loader process failed (loader_workers: {self._loader_workers}): {describe(error)}"
            ) from error

    def close(self) -> None:
        """End the loader processes, and read nothing ahead any more."""
        self._loaded = []
        if self._looking is not None:
            self._assembler.close()
            self._samples.expect({})


class _Told:
    """What a loader of shards reads from: it is told of the blocks to come along with a request."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __getitem__(self, told: tuple[Request, Expected | None]) -> Fetched | FetchTrouble:
        request, blocks = told
        if blocks is not None:
            self._samples.expect(blocks)
        return self._samples[request]


def _loading(samples: Samples | _Told, plan: Iterator[Any], loader_workers: int, prefetch: int) -> Iterator[bytes]:
    loader: DataLoader[Any] = DataLoader(
        samples,  # type: ignore[arg-type]
        sampler=_Plan(plan),
        batch_size=None,
        collate_fn=_packed,  # type: ignore[arg-type]
        num_workers=loader_workers,
        prefetch_factor=prefetch,
        multiprocessing_context="fork",
        worker_init_fn=partial(_begin_loader, os.getpid()),
    )
    with _child_signals_kept():
        return iter(loader)


def batch_of(answer: Fetched | FetchTrouble) -> Batch:
    """The batch; what was in the way of it is raised here."""
    if isinstance(answer, Fetched):
        indices = answer.request.indices
        samples = indices if not answer.bad else tuple(index for index in indices if index not in answer.bad)
        return Batch(answer.batch, samples, answer.bad)
    source = answer.request.source.value
    where = "collate()" if answer.index is None else f"sample {answer.index} of the {source} set"
    if answer.kind == "access" or (answer.kind == "sample" and not answer.traceback):
        where = f"the {source} set" if answer.index is None else where
        raise JobError(with_hint(f"{where} cannot be read: {answer.message}", answer.hint))
    raise UserCodeError(with_hint(f"{answer.message} (in {where})", answer.hint), answer.traceback)


@contextmanager
def _child_signals_kept() -> Iterator[None]:
    # A loader tells of its death by an exception out of a signal handler: welcome while waiting for a batch, but not in
    # the middle of the user's loss or of an update.
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def _tell_of_death(*_: object) -> None:
    torch._C._error_if_any_worker_fails()


def _packed(fetched: Fetched | FetchTrouble) -> bytes:
    # Here rather than in the loader's queue, which drops what cannot be pickled: the worker would wait for ever.
    try:
        return bytes(ForkingPickler.dumps(fetched))
    except Exception as error:
        hint = "With loader_workers above 0 a batch travels between processes, so it must be picklable."
        trouble = FetchTrouble(fetched.request, None, describe(error), user_traceback(error), hint)
        return bytes(ForkingPickler.dumps(trouble))


def _begin_loader(worker: int, _: int) -> None:
    # What the worker has left to be collected may wait, when it is, for threads that a loader does not have.
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(worker)
