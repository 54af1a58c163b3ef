"""Time, waiting and threads, for code that the simulator runs as well.

Whoever waits takes a `Runtime`, and reads no clock and starts no thread of its own: so the simulator can have the same
code wait in virtual time.
"""

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol


class Condition(Protocol):
    """Held by one thread at a time, but for the time in which it waits: a `threading.Condition`, as far as needed."""

    def __enter__(self) -> bool: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until it holds, or for so many seconds; whether it does. Looked at whenever somebody notifies."""
        ...

    def notify_all(self) -> None:
        """Have those who wait look again."""
        ...


class Thread(Protocol):
    """Something that runs beside its caller."""

    def join(self) -> None:
        """Wait until it has ended."""
        ...


class Runtime(Protocol):
    """Given to whoever waits, by the process that it lives in."""

    def now(self) -> float:
        """Seconds that never go back."""
        ...

    def condition(self) -> Condition:
        """A new one, that nobody holds."""
        ...

    def spawn(self, name: str, work: Callable[[], None]) -> Thread:
        """Have something run beside the caller. It does not keep the process from ending."""
        ...


class SystemRuntime:
    """The machine's own clock and threads."""

    now = staticmethod(time.monotonic)
    condition = staticmethod(threading.Condition)

    def spawn(self, name: str, work: Callable[[], None]) -> Thread:
        """A daemon: who fails before it can end its threads must still be able to exit."""
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread


SYSTEM = SystemRuntime()


class Latch:
    """Is set once, for good; whoever waits on it ends its pause then."""

    def __init__(self, runtime: Runtime) -> None:
        self._changed = runtime.condition()
        self.wakes = 0
        self.is_set = False

    def set(self) -> None:
        with self._changed:
            self.is_set = True
            self._changed.notify_all()

    def wake(self) -> None:
        """End the pause of those who wait for it. It is not set by that."""
        with self._changed:
            self.wakes += 1
            self._changed.notify_all()

    def wait(self, seconds: float, since: int | None = None) -> bool:
        """Pause for so many seconds, or until it is set; whether it is. Given how many `wakes` there were, also until
        there is another."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.is_set or (since is not None and self.wakes != since), max(0.0, seconds)
            )
            return self.is_set
