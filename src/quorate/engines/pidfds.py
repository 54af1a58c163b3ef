"""Processes that somebody else has started, and whose end is waited for all the same."""

import contextlib
import os
import select
import signal
import time


class Pidfds:
    """A descriptor for each process: unlike its pid, it never comes to mean another one."""

    def __init__(self) -> None:
        self._descriptors: dict[int, int] = {}

    def add(self, pid: int) -> None:
        """Watch a process; one that is gone already is not watched."""
        try:
            self._descriptors[pid] = os.pidfd_open(pid)
        except ProcessLookupError:
            return

    def discard(self, pid: int) -> None:
        """Watch a process no longer."""
        descriptor = self._descriptors.pop(pid, None)
        if descriptor is not None:
            os.close(descriptor)

    def kill(self, pid: int) -> None:
        """End a process, and no other that may have its number by now."""
        descriptor = self._descriptors.get(pid)
        if descriptor is not None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)

    def await_end(self, seconds: float) -> list[int]:
        """Wait until all have ended, for so many seconds at most; the pids of those that have not."""
        over = time.monotonic() + seconds
        while self._descriptors:
            remaining = max(0.0, over - time.monotonic())
            ended, _, _ = select.select(list(self._descriptors.values()), [], [], remaining)
            for pid in [pid for pid, descriptor in self._descriptors.items() if descriptor in ended]:
                self.discard(pid)
            if not ended and not remaining:
                break
        return sorted(self._descriptors)

    def close(self) -> None:
        """Let go of all."""
        for pid in list(self._descriptors):
            self.discard(pid)
