"""Signals that have ended a job that a script or a notebook has started."""

import contextlib
import signal
from collections.abc import Iterator, Sequence

from quorate.core.failure import JobFailed
from quorate.supervisor.signals import Signals, collecting_signals


@contextlib.contextmanager
def passing_on_signals() -> Iterator[Signals]:
    """Around a job that raises `JobFailed` also when a signal has ended it; the signals that came while it ran."""
    with collecting_signals() as signals:
        try:
            yield signals
        except JobFailed as failed:
            pass_on_signal(failed.failure.exit_code, failed.message, signals.received)
            raise


def pass_on_signal(exit_code: int, message: str, received: Sequence[int] = ()) -> None:
    """Let a signal do what it does without a job, now that the job is over: end what the job was a part of.

    Without this, Ctrl-C in a loop over several jobs would only begin the next one. It is the first that was `received`:
    the exit code does not tell SIGHUP from SIGTERM.
    """
    if exit_code <= 128:
        return
    number = received[0] if received else exit_code - 128
    handler = signal.getsignal(number)
    if callable(handler) and handler is not signal.default_int_handler:
        handler(number, None)
    elif number == signal.SIGINT:
        raise KeyboardInterrupt(message) from None
    else:
        raise SystemExit(exit_code) from None
