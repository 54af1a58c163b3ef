"""Ctrl-C and SIGTERM: once is a request to stop, twice is an order."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Signals:
    """How often the user has asked for an end."""

    received: list[int] = field(default_factory=list)

    @property
    def reason(self) -> str | None:
        """What the job is told."""
        if not self.received:
            return None
        return "terminated" if self.received[0] == signal.SIGTERM else "interrupted"

    @property
    def at_once(self) -> bool:
        """Whether to wait no longer."""
        return len(self.received) > 1

    @property
    def exit_code(self) -> int:
        """What a command ends with that was stopped by them, as shells count: 130 or 143."""
        return 128 + (self.received[0] if self.received else signal.SIGINT)


@contextmanager
def listening_to_signals() -> Iterator[Signals]:
    """Handlers only set a flag. Outside the main thread there is nothing to listen to."""
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    before = {
        number: signal.signal(number, lambda received, _: signals.received.append(received))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
