"""Ctrl-C, SIGTERM and SIGHUP: once is a request to stop, twice is an order.

SIGHUP, which comes when the terminal is closed, counts as SIGTERM does: the job ends as terminated, with a checkpoint
and exit code 143. It never hurries, since it often comes twice, from the shell and from the kernel. It is heard only
where it would end the program: where it is ignored (nohup), or means something else to the program, it stays as it is.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from quorate.core.failure import Failure


@dataclass
class Signals:
    """How often the user has asked for an end."""

    received: list[int] = field(default_factory=list)

    @property
    def reason(self) -> str | None:
        if not self.received:
            return None
        return "interrupted" if self.received[0] == signal.SIGINT else "terminated"

    @property
    def at_once(self) -> bool:
        return sum(number != signal.SIGHUP for number in self.received) > 1

    @property
    def exit_code(self) -> int:
        """What a command ends with that was stopped by them, as shells count: 130 or 143."""
        return 128 + (signal.SIGTERM if self.reason == "terminated" else signal.SIGINT)

    def failure(self, message: str) -> Failure:
        """What a job ends with that they have ended."""
        return Failure("Interrupted", message, exit_code=self.exit_code)


@dataclass(frozen=True)
class _Listener:
    """The handler while a job runs: it only takes notes."""

    signals: Signals

    def __call__(self, number: int, _: Any) -> None:
        self.signals.received.append(number)


_collected: ContextVar[Signals | None] = ContextVar("_collected", default=None)


@contextmanager
def collecting_signals() -> Iterator[Signals]:
    """What the jobs of this block have heard; before and after them a signal does what it does without a job."""
    before = _collected.get()
    signals = before or Signals()
    _collected.set(signals)
    try:
        yield signals
    finally:
        _collected.set(before)


@contextmanager
def listening_to_signals() -> Iterator[Signals]:
    """Handlers only set a flag, which a job that is under way looks at: nothing else that takes long is done here.
    Outside the main thread there is nothing to listen to.

    Whoever listens while somebody else does already hears the same.
    """
    signals, handler = _collected.get() or Signals(), signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Listener):
        signals = handler.signals
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    hangup = signal.getsignal(signal.SIGHUP)
    would_end_the_program = (
        hangup == signal.SIG_DFL or isinstance(hangup, _Listener) or getattr(hangup, "gives_way_to_jobs", False)
    )
    before = {
        number: signal.signal(number, _Listener(signals))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if number != signal.SIGHUP or would_end_the_program
    }
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
