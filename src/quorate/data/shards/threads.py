"""Threads that help with reading, and waiting for them that can be interrupted."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

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
