"""The stream of batches that a worker reads, fetched ahead in loader processes or, with none, just in time."""

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from quorate.core.errors import JobError, UserCodeError
from quorate.core.processes import die_with_parent
from quorate.core.user_code import describe, user_traceback, with_hint
from quorate.data.reading import Request
from quorate.data.samples import Fetched, FetchTrouble, Samples


class _Requests(Sampler[Request]):
    def __init__(self, requests: Iterator[Request]) -> None:
        self._requests = requests

    def __iter__(self) -> Iterator[Request]:
        return self._requests


class Feed:
    """Batches in the order of a reading plan.

    Never a thread: a thread that draws from a global generator would race with the lane that is computing.
    """

    def __init__(self, samples: Samples, requests: Iterator[Request], loader_workers: int, threads: int) -> None:
        self._samples = samples
        self._loaded = _load_ahead(samples, requests, loader_workers) if loader_workers else None
        self._loader_workers = loader_workers
        # Loader processes compute with one thread, so fetching in this process does too: same bits either way.
        self._threads = threads if loader_workers == 0 and threads > 1 else None

    def next(self, expected: Request) -> Any:
        """The batch that answers `expected`, which must be the next request of the plan."""
        answer = self._read(expected) if self._loaded is None else self._take(self._loaded)
        if answer.request != expected:
            raise AssertionError(f"The feed gave {answer.request} where the loop expected {expected}.")
        return batch_of(answer)

    def _read(self, request: Request) -> Fetched | FetchTrouble:
        if self._threads is None:
            return self._samples[request]
        torch.set_num_threads(1)
        try:
            return self._samples[request]
        finally:
            torch.set_num_threads(self._threads)

    def _take(self, loaded: Iterator[bytes]) -> Fetched | FetchTrouble:
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
        """End the loader processes."""
        self._loaded = None


def _load_ahead(samples: Samples, requests: Iterator[Request], loader_workers: int) -> Iterator[bytes]:
    loader: DataLoader[Any] = DataLoader(
        samples,  # type: ignore[arg-type]
        sampler=_Requests(requests),
        batch_size=None,
        collate_fn=_packed,  # type: ignore[arg-type]
        num_workers=loader_workers,
        multiprocessing_context="fork",
        worker_init_fn=partial(_begin_loader, os.getpid()),
    )
    with _child_signals_kept():
        return iter(loader)


def batch_of(answer: Fetched | FetchTrouble) -> Any:
    """The batch; what user code raised instead of giving it is raised here."""
    if isinstance(answer, Fetched):
        return answer.batch
    source = answer.request.source.value
    where = "collate()" if answer.index is None else f"sample {answer.index} of the {source} set"
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
