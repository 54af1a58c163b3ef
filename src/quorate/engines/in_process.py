"""An engine for debugging: one worker, in the thread that serves it, where a breakpoint stops at the terminal."""

import bdb
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from queue import Empty, SimpleQueue
from typing import Any

from quorate.core.addresses import LOOPBACK
from quorate.core.machine import usable_cores
from quorate.engines.engine import Capacity, Exited, Notice, Preparation, Ready, SettingUp, Started, Unprepared
from quorate.engines.fork_server import ImportedTask, unprepared
from quorate.engines.warm import CoordinatorChildProcess
from quorate.storage.run_folder import RunFolder
from quorate.worker.assignment import Assignment
from quorate.worker.status import announce_start, read_status, status_file

Lane = Callable[[], int | None]


class InProcessEngine:
    """Runs its worker in the thread that calls `serve`, while the supervisor has another. Fulfils `Engine`.

    The worker lives within `around`, which gets the class of its task and what tells the lane that is computed;
    `on_error` is called with the exception that ends it.
    """

    def __init__(
        self,
        run: RunFolder,
        preparation: Preparation,
        around: Callable[[Any, Lane], contextlib.AbstractContextManager[None]] = lambda *_: contextlib.nullcontext(),
        on_error: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        self._around, self._on_error = around, on_error
        self._run = run
        self._preparation = preparation
        self._asked: SimpleQueue[Assignment | None] = SimpleQueue()
        self._notices: SimpleQueue[Notice] = SimpleQueue()
        self._new: int | None = None
        self._is_over = threading.Event()

    def serve(self) -> None:
        """Import the task, and be its worker, until the supervisor closes the engine."""
        try:
            try:
                asked = vars(self._preparation)
                task = ImportedTask(asked)
                task.check(asked)
                self._notices.put(Ready(task.found(asked)))
            except Exception as error:
                self._notices.put(Unprepared(unprepared(error)))
            for assignment in iter(self._asked.get, None):
                self._notices.put(Started(assignment.slot, os.getpid(), "in the launcher's own process"))
                self._new = assignment.slot
                code = self._live(assignment, task)
                self._new = None
                status = read_status(status_file(self._run, assignment.slot))
                self._notices.put(Exited(assignment.slot, os.getpid(), code, status))
        finally:
            self._is_over.set()

    def _live(self, assignment: Assignment, task: ImportedTask) -> int:
        from quorate.worker.process import Worker

        worker = Worker(assignment, task.type, self._on_error)
        # The second Ctrl-C, where no code of the user's runs.
        with contextlib.suppress(bdb.BdbQuit), self._around(task.type, lambda: worker.lane):
            return worker.live()
        return -signal.SIGINT

    def capacity(self) -> Capacity:
        return Capacity(usable_cores())

    def start_coordinator(self, appointment: Mapping[str, Any]) -> CoordinatorChildProcess:
        return CoordinatorChildProcess(appointment, LOOPBACK)

    def start(self, assignment: Assignment) -> None:
        announce_start(status_file(self._run, assignment.slot))
        self._asked.put(assignment)

    def poll(self, seconds: float) -> list[Notice]:
        with contextlib.suppress(Empty):
            return [self._notices.get(timeout=seconds), *self._setup()]
        return list(self._setup())

    def _setup(self) -> Iterator[Notice]:
        slot = self._new
        status = None if slot is None else read_status(status_file(self._run, slot))
        if slot is not None and status is not None:
            yield SettingUp(slot, os.getpid(), status.phase if status.is_new else None)
            self._new = slot if status.is_new and self._new is not None else None

    def kill(self, slot: int, pid: int) -> None:
        """It cannot be: what counts as lost hears so from its coordinator, and ends by itself."""

    def terminate(self, slot: int, pid: int) -> None:
        """The same."""

    def close(self) -> None:
        self._asked.put(None)
        self._is_over.wait()
