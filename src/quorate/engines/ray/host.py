"""A host of a job that has several: a local engine there, run from elsewhere by commands in and reports out.

Nothing in here knows what carries commands and reports. A report is kept until it is known to have arrived, so that a
connection may break at any moment and nothing is lost or told twice.
"""

import contextlib
import itertools
import logging
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from quorate.core.addresses import Network, is_url
from quorate.core.errors import QuorateError
from quorate.core.failure import Failure
from quorate.engines.engine import Engine, Notice, Preparation, Unprepared
from quorate.engines.local import LocalEngine
from quorate.engines.output_pump import OpenLog
from quorate.engines.ray.shared_storage import why_out_of_reach
from quorate.storage.fencing import hold, holder_of
from quorate.storage.log_file import LogFile
from quorate.storage.objects import open_store
from quorate.storage.run_folder import RunFolder
from quorate.worker.assignment import Assignment

log = logging.getLogger(__name__)

TICK = 0.02
"""Seconds until a command is noticed."""
UNDERWAY = 32 * 2**20
"""Bytes of logs on their way: what comes before these have arrived is left out, which the log says."""
AT_ONCE = 4 * 2**20
"""Bytes of logs that are told at once."""
CLOSE_PATIENCE = 20.0


@dataclass(frozen=True)
class WorkersEnded:
    """All workers of this host are gone, as was asked for."""


@dataclass(frozen=True)
class StorageChecked:
    """Whether this host reaches the run's storage; `reason` is why it does not."""

    reason: str


@dataclass(frozen=True)
class LogLines:
    """What a process of this host has logged: whole lines, for the log of that name."""

    log: str
    text: bytes


@dataclass(frozen=True)
class AgentFailed:
    """The agent itself has failed, and has ended whatever it had."""

    reason: str


Report = Notice | LogLines | WorkersEnded | StorageChecked | AgentFailed

EngineMaker = Callable[[RunFolder, Preparation, Network, OpenLog], Engine]


def local_engine(run: RunFolder, preparation: Preparation, network: Network, open_log: OpenLog) -> Engine:
    """What a host runs its workers on."""
    return LocalEngine(run, preparation, lambda _place: network, open_log=open_log)


class HostAgent:
    """Runs an engine in a thread of its own, which alone calls it.

    Its processes have a folder on this host in the place of the run's, which is gone when the agent is closed. What
    they print and log is reported.
    """

    def __init__(self, run_name: str, network: Network, make_engine: EngineMaker = local_engine) -> None:
        self._network = network
        self._make_engine = make_engine
        self._scratch = Scratch()
        self._run = RunFolder(self._scratch.path / run_name)
        self._run.logs.mkdir(parents=True)
        self._engine: Engine | None = None
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._reports: deque[tuple[int, Report]] = deque()
        # Bytes of logs among these.
        self._underway = 0
        self._numbers = itertools.count(1)
        self._arrived = threading.Condition()
        self._is_closed = False
        # Whatever it starts ends with this thread, so it ends last.
        self._thread = threading.Thread(target=self._serve, name="host", daemon=True)
        self._thread.start()

    # --- from any thread

    def tell(self, command: str, *arguments: Any) -> None:
        """Have a command carried out, after those before it; does not wait.

        ``check_storage place nonce`` looks whether a folder here, or a store, is the launcher's and can be written;
        ``prepare preparation`` imports the task, once; ``start assignment``, ``kill slot pid`` and ``terminate slot
        pid`` are those of the engine; ``end_workers`` ends all workers for good.
        """
        self._commands.put(partial(getattr(self, f"_{command}"), *arguments))

    def next(self, arrived: int, seconds: float) -> list[tuple[int, Report]]:
        """The reports after that number, each with its own; waits that long for one. Those up to it are forgotten."""
        with self._arrived:
            while self._reports and self._reports[0][0] <= arrived:
                self._underway -= _size(self._reports.popleft()[1])
            self._arrived.wait_for(lambda: self._reports or self._is_closed, seconds)
            told, size = [], 0
            for number, report in self._reports:
                told.append((number, report))
                size += _size(report)
                if size >= AT_ONCE:
                    break
            return told

    def close(self) -> None:
        """End all processes, and wait until they are gone. What they have logged last can still be asked for."""
        self._is_closed = True
        self._thread.join(CLOSE_PATIENCE)
        with self._arrived:
            self._arrived.notify_all()

    # --- the thread

    def _serve(self) -> None:
        reason = ""
        try:
            while not self._is_closed:
                self._carry_out()
        except Exception as error:
            log.exception("the host's agent has failed")
            reason = f"its agent has failed ({error!r})"
        try:
            self._end_workers()
        finally:
            self._scratch.close()
            if reason:
                self._report(AgentFailed(reason))

    def _carry_out(self) -> None:
        """One round: what was asked for, then what has happened."""
        with contextlib.suppress(Empty):
            command = self._commands.get(timeout=TICK) if self._engine is None else self._commands.get_nowait()
            while True:
                command()
                command = self._commands.get_nowait()
        if self._engine is not None:
            for notice in self._engine.poll(TICK):
                self._report(notice)

    def _check_storage(self, place: str, nonce: str) -> None:
        self._report(StorageChecked(why_out_of_reach(place, nonce, self._network.host)))

    def _kill(self, slot: int, pid: int) -> None:
        if self._engine is not None:
            self._engine.kill(slot, pid)

    def _terminate(self, slot: int, pid: int) -> None:
        if self._engine is not None:
            self._engine.terminate(slot, pid)

    def _prepare(self, preparation: Preparation) -> None:
        if self._engine is None:
            try:
                self._engine = self._make_engine(self._run, preparation, self._network, self._open_log)
            except QuorateError as error:
                self._report(Unprepared(Failure.of(error)))

    def _start(self, assignment: Assignment) -> None:
        if self._engine is not None:
            storage, checkpoint = assignment.storage or assignment.run, assignment.checkpoint
            if is_url(storage):
                # A folder of this host shows what lies there.
                own = RunFolder(Path(assignment.run)).checkpoints
                self._run.keep_in(open_store(storage))
                storage = str(self._run.path)
                if checkpoint is not None and Path(checkpoint).parent == own:
                    checkpoint = str(self._run.checkpoints / Path(checkpoint).name)
            self._engine.start(replace(assignment, run=str(self._run.path), storage=storage, checkpoint=checkpoint))

    def _report(self, report: Report) -> None:
        with self._arrived:
            self._reports.append((next(self._numbers), report))
            self._underway += _size(report)
            self._arrived.notify_all()

    def _open_log(self, name: str, fields: dict[str, Any]) -> LogFile:
        return ReportedLog(self._run.logs / f"{name}.jsonl", fields, self._report_lines)

    def _report_lines(self, lines: LogLines) -> None:
        if self._underway >= UNDERWAY:
            raise OSError("the launcher does not take what is logged")
        self._report(lines)

    def _end_workers(self) -> None:
        """It is said when all that they have logged is on its way."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        self._report(WorkersEnded())


def _size(report: Report) -> int:
    return len(report.text) if isinstance(report, LogLines) else 0


class ReportedLog(LogFile):
    """A log that is told to the launcher, which has its file."""

    def __init__(self, path: Path, fields: dict[str, Any], report: Callable[[LogLines], None]) -> None:
        super().__init__(path, fields)
        self._report = report

    def _write(self, lines: Sequence[str]) -> None:
        text = "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace")
        self._report(LogLines(self.path.stem, text))


PREFIX, LOCK = "quorate-host-", "lock"


class Scratch:
    """A folder for as long as this process lives. What agents that were killed have left is removed by the next one
    on the same machine: a folder whose owner lives is locked."""

    def __init__(self) -> None:
        for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):
                if holder_of(left / LOCK) is None:
                    shutil.rmtree(left, ignore_errors=True)
        self._lock = contextlib.ExitStack()
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            with contextlib.suppress(OSError):
                self._lock.enter_context(hold(self.path / LOCK))
                if self.path.exists():  # otherwise another agent took it for one that was left
                    break

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()
