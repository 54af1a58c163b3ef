"""A coordinator on another host, as whoever replaces a dead one holds it."""

import threading
from collections.abc import Callable
from typing import Any

from quorate.core.errors import JobError
from quorate.core.failure import Failure

KILL_PATIENCE = 5.0
"""Seconds for which the end of one that was killed is waited for. A host that does not answer may still have it; it is
fenced by its incarnation."""


class RemoteCoordinator:
    """Fulfils `CoordinatorChild`. `end` has it end on its host, within so many seconds."""

    def __init__(self, number: int, end: Callable[["RemoteCoordinator", float], None]) -> None:
        self.number = number
        self.pid = 0
        self._end = end
        self._changed = threading.Condition()
        self._answer: dict[str, Any] | None = None
        self._failure: Failure | None = None
        self._departure: str | None = None

    def answered(self, pid: int, answer: dict[str, Any], failure: Failure | None) -> None:
        """It listens, or cannot."""
        with self._changed:
            self.pid, self._answer, self._failure = pid, answer, failure
            self._changed.notify_all()

    def ended(self, departure: str) -> None:
        """It is gone, or counts as that."""
        with self._changed:
            self._departure = self._departure or departure
            self._changed.notify_all()

    def await_answer(self, limit: float | None = None) -> dict[str, Any]:
        with self._changed:
            told = self._changed.wait_for(lambda: self._answer is not None or self._departure is not None, limit)
            # The failure says more than the end that follows it, and comes first.
            answer, failure = self._answer, self._failure
        if failure is not None:
            raise failure.error()
        if not told:
            self.kill()
        if answer is None:
            raise JobError(f"{self.departure} before it listened.")
        return answer

    @property
    def is_alive(self) -> bool:
        return self._departure is None

    @property
    def departure(self) -> str:
        return self._departure or f"the coordinator (pid {self.pid}) lives"

    def kill(self) -> None:
        self._finish(0.0)

    def close(self, patience: float) -> None:
        self._finish(patience)

    def _finish(self, patience: float) -> None:
        if self._departure is not None:
            return
        self._end(self, patience)
        with self._changed:
            if not self._changed.wait_for(lambda: self._departure is not None, patience + KILL_PATIENCE):
                self._departure = f"the coordinator (pid {self.pid}) was to end, and its host does not answer"
