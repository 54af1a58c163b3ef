"""Threads that help with reading, and waiting for them that can be interrupted."""

import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

CHECK_EVERY = 0.1
"""Seconds between two looks at whether what is waited for is still wanted."""


def start_helper(work: Callable[[], None], name: str) -> threading.Thread:
    """Start a thread that ends with the process, if not before."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    # Signals are for the main thread, whose waiting they must interrupt; a thread inherits what is blocked.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return thread


class Closed(Exception):  # noqa: N818
    """Nobody is to be asked any more."""


Done = TypeVar("Done")


class HelperThreads:
    """Threads that do what they are given in its order, each for as long as that takes: nobody waits for one.

    They are kept, as the connections to a store are that some libraries have by thread; a new one is started when all
    are busy, as long as there are fewer than `most`.
    """

    def __init__(self, name: str, most: int = sys.maxsize) -> None:
        self._name, self._most = name, most
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.threads: list[threading.Thread] = []
        self._idle = 0
        self._is_closed = False

    def submit(self, work: Callable[[], Done]) -> Future[Done]:
        """Have it done; `Closed` if nothing is done any more."""
        future: Future[Done] = Future()
        with self._lock:
            if self._is_closed:
                raise Closed
            if self._idle:
                self._idle -= 1
            elif len(self.threads) < self._most:
                self.threads.append(start_helper(self._work, self._name))
            self._tasks.put((future, work))
        return future

    @property
    def is_alive(self) -> bool:
        return any(thread.is_alive() for thread in self.threads)

    def close(self, grace: float = 0.0) -> None:
        """Begin nothing else, and wait for so many seconds at most: what takes longer ends by itself."""
        with self._lock:
            self._is_closed = True
            for _ in self.threads:
                self._tasks.put(None)
        if grace:
            for thread in self.threads:
                thread.join(grace)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None and not self._is_closed:
            future, work = task
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            del task, future, work  # what was done is not kept until there is more to do
            with self._lock:
                self._idle += 1


class Interrupted(BaseException):
    """What is waited for is wanted no longer; `reason` is the error that says why.

    No `Exception`: a dataset of the task that catches those would take it for trouble with its data, and go on.
    """

    def __init__(self, reason: Exception) -> None:
        self.reason = reason
        super().__init__(str(reason))


_check: ContextVar[Callable[[], None] | None] = ContextVar("check", default=None)


@contextmanager
def interruptible(check: Callable[[], None]) -> Iterator[None]:
    """In this thread, whoever waits for bytes calls `check` now and then; what it raises ends the waiting."""
    before = _check.set(check)
    try:
        yield
    except Interrupted as interrupted:
        raise interrupted.reason from None
    finally:
        _check.reset(before)


def check_interrupted() -> None:
    """Raise `Interrupted` if what this thread waits for is not wanted any more."""
    check = _check.get()
    if check is None:
        return
    try:
        check()
    except Exception as error:
        raise Interrupted(error) from None
