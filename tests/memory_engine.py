"""An engine whose processes are only numbers, for tests of what stands on an engine."""

import signal
from collections.abc import Mapping, Sequence
from typing import Any

from quorate.core.addresses import LOOPBACK
from quorate.core.failure import Failure
from quorate.engines.engine import (
    Capacity,
    CoordinatorChild,
    Exited,
    Interrupted,
    Notice,
    Prepared,
    Ready,
    SettingUp,
    Started,
    Unprepared,
)
from quorate.engines.warm import CoordinatorChildProcess
from quorate.worker.assignment import Assignment

FIRST_PID = 4710


class MemoryEngine:
    """Workers start at once, unless it `is_importing`; where it `sets_up` nobody, they are done with that at once.

    The parameter `exits_with` of a job has its workers end by themselves.
    """

    def __init__(self, failure: Failure | None = None) -> None:
        self._notices: list[Notice] = [Ready(Prepared({}, None)) if failure is None else Unprepared(failure)]
        self._asked: list[Assignment] = []
        self._pids = 0
        self.running: dict[int, int] = {}
        self.killed: list[int] = []
        self.terminated: list[int] = []
        self.is_importing = False
        self.sets_up = True

    def capacity(self) -> Capacity:
        return Capacity(4)

    def start_coordinator(self, appointment: Mapping[str, Any]) -> CoordinatorChild:
        """A real one: what stands on an engine calls it."""
        return CoordinatorChildProcess(appointment, LOOPBACK)

    def start(self, assignment: Assignment) -> None:
        self._asked.append(assignment)

    def poll(self, seconds: float) -> Sequence[Notice]:
        while self._asked and not self.is_importing:
            assignment = self._asked.pop(0)
            slot, pid = assignment.slot, FIRST_PID + self._pids
            self._pids += 1
            self.running[slot] = pid
            self._notices += [
                Started(slot, pid, "remembered"),
                SettingUp(slot, pid, "model()" if self.sets_up else None),
            ]
            code = assignment.job.get("params", {}).get("exits_with")
            if code is not None:
                self.exit(slot, code)
        notices, self._notices = self._notices, []
        return notices

    def kill(self, slot: int, pid: int) -> None:
        if self.running.get(slot) == pid:
            self.killed.append(pid)
            self.exit(slot, -signal.SIGKILL)

    def terminate(self, slot: int, pid: int) -> None:
        if self.running.get(slot) == pid:
            self.terminated.append(pid)
            self.exit(slot, 0)

    def close(self) -> None:
        self.running.clear()

    def exit(self, slot: int, code: int) -> None:
        """A worker's process ends."""
        self._notices.append(Exited(slot, self.running.pop(slot), code))

    def fail(self, failure: Failure) -> None:
        """The task cannot be imported any more."""
        self._notices.append(Unprepared(failure))

    def interrupt(self) -> None:
        """The engine itself fails."""
        self._notices.append(Interrupted("the memory was lost"))
        for slot in list(self.running):
            self.exit(slot, -signal.SIGKILL)
