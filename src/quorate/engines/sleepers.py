"""Workers that were stopped by a fault on purpose, and are woken when their time is over."""

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from quorate.core.fault import Act, Fault
from quorate.worker.faults import Firing, firings


class Sleepers:
    """Knows by the markers in a run's logs who has stopped itself; a worker that sleeps cannot wake itself."""

    def __init__(self, faults: Sequence[Fault], logs: Path) -> None:
        self._faults = faults
        self._logs = logs
        self._waits = any(fault.act is Act.STOP for fault in faults)
        self._asleep_since: dict[Firing, float] = {}
        self._done: set[Firing] = set()

    def wake_those_due(self, running: Mapping[int, int], now: float) -> None:
        """Wake whoever has slept for long enough; `running` are the workers' processes, of which some may be gone."""
        if not self._waits:
            return
        for firing in firings(self._logs):
            fault = self._faults[firing.fault]
            if fault.act is not Act.STOP or firing in self._done or firing.pid not in running.values():
                continue
            # The marker comes first: a signal before the worker sleeps would be lost, and it would sleep for ever.
            if _is_asleep(firing.pid) and now - self._asleep_since.setdefault(firing, now) >= (fault.seconds or 0.0):
                self._done.add(firing)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(firing.pid, signal.SIGCONT)


def _is_asleep(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
