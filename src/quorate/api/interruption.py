"""Signals that have ended a job that a script or a notebook has started."""

import contextlib
import signal
from collections.abc import Iterator

from quorate.core.failure import JobFailed


@contextlib.contextmanager
def passing_on_signals() -> Iterator[None]:
    """While a job runs that raises `JobFailed` also when a signal has ended it."""
    try:
        yield
    except JobFailed as failed:
        pass_on_signal(failed.failure.exit_code, failed.message)
        raise


def pass_on_signal(exit_code: int, message: str) -> None:
    """Let a signal do what it does without a job, now that the job is over: end what the job was a part of.

    Without this, Ctrl-C in a loop over several jobs would only begin the next one.
    """
    number = exit_code - 128
    if number <= 0:
        return
    handler = signal.getsignal(number)
    if callable(handler) and handler is not signal.default_int_handler:
        handler(number, None)
    elif number == signal.SIGINT:
        raise KeyboardInterrupt(message) from None
    else:
        raise SystemExit(exit_code) from None
