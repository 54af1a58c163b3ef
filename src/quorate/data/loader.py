"""A loader: processes that fetch what a plan asks for, ahead of whoever takes it."""

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Sampler

from quorate.core.processes import die_with_parent
from quorate.core.user_code import describe, user_traceback
from quorate.data.samples import Fetched, FetchTrouble
from quorate.data.shards.threads import start_helper
from quorate.data.shards.waits import LOOK

_GRACE = 1.0
# The words of a DataLoader that has waited for its `timeout`, and can be asked again.
_NOT_YET = "DataLoader timed out"


class Fetching(Protocol):
    """What is asked in a loader's processes."""

    def __getitem__(self, asked: Any, /) -> Fetched | FetchTrouble: ...


class Loader:
    """Answers what a plan asks, in its order. A process that dies is told as a RuntimeError, OSError or EOFError."""

    def __init__(self, samples: Fetching, plan: Iterator[Any], processes: int, prefetch: int) -> None:
        loader: DataLoader[Any] = DataLoader(
            samples,  # type: ignore[arg-type]
            sampler=_Plan(plan),
            batch_size=None,
            collate_fn=_packed,  # type: ignore[arg-type]
            num_workers=processes,
            prefetch_factor=prefetch,
            multiprocessing_context="fork",
            worker_init_fn=partial(_begin_process, os.getpid()),
            timeout=LOOK,
        )
        before = set(multiprocessing.active_children())
        with _child_signals_kept():
            self._answers: list[Iterator[bytes]] = [iter(loader)]
        self._processes: list[BaseProcess] = [each for each in multiprocessing.active_children() if each not in before]

    def take(self, check: Callable[[], None]) -> Fetched | FetchTrouble:
        """The next answer; while it is waited for, `check` is called now and then."""
        while True:
            with _child_signals_kept():
                signal.signal(signal.SIGCHLD, _tell_of_death)
                _tell_of_death()
                try:
                    answer = next(self._answers[0])
                    break
                except RuntimeError as error:
                    if not str(error).startswith(_NOT_YET):
                        raise
            check()
        return ForkingPickler.loads(answer)  # type: ignore[no-any-return]

    @staticmethod
    def end(loaders: Sequence["Loader"]) -> None:
        """End the processes of all these loaders, whatever they are doing: they have nothing to lose."""
        processes = [process for loader in loaders for process in loader._processes]
        for loader in loaders:
            _forget_processes(loader._answers[0])
        for process in processes:
            process.kill()
        over = monotonic() + _GRACE
        for process in processes:
            process.join(max(0.0, over - monotonic()))
            _remove_memory(process.pid)
        # A process that is killed may have held a lock for which a DataLoader waits when it is let go.
        answers = [loader._answers for loader in loaders]
        if answers:
            start_helper(partial(_let_go, answers), "loader-end")


def _remove_memory(process: int | None) -> None:
    """Of a process that was killed between making shared memory and taking its name away."""
    for left in Path("/dev/shm").glob(f"torch_{process}_*"):
        left.unlink(missing_ok=True)


def _forget_processes(iterator: Any) -> None:
    # torch knows the processes of all DataLoaders that there are, and each tells of any that was killed.
    if iterator._worker_pids_set:
        torch._C._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False  # or it would do so once more when it is let go


def _let_go(answers: list[list[Iterator[bytes]]]) -> None:
    for each in answers:
        each.clear()


class _Plan(Sampler[Any]):
    def __init__(self, plan: Iterator[Any]) -> None:
        self._plan = plan

    def __iter__(self) -> Iterator[Any]:
        return self._plan


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


def _begin_process(worker: int, _: int) -> None:
    # What the worker has left to be collected may wait, when it is, for threads that a loader does not have.
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(worker)
