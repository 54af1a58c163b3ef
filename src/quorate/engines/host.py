"""A host of a job that has several: a local engine there, run from elsewhere by commands in and reports out.

Nothing in here knows what carries commands and reports. A report is kept until it is known to have arrived, so that a
connection may break at any moment and nothing is lost or told twice.
"""

import contextlib
import fcntl
import itertools
import logging
import os
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from quorate.core.addresses import is_url
from quorate.core.errors import QuorateError
from quorate.core.failure import Failure
from quorate.core.networks import Network
from quorate.engines.coordinator_child import CoordinatorChildProcess
from quorate.engines.engine import Engine, Notice, Preparation, Unprepared
from quorate.engines.local import LocalEngine
from quorate.engines.shared_storage import why_out_of_reach
from quorate.storage.log_file import parts_of
from quorate.storage.objects import open_store
from quorate.storage.run_folder import RunFolder
from quorate.worker.assignment import Assignment

log = logging.getLogger(__name__)

TICK = 0.02
"""Seconds until a command is noticed."""
LOOK_AT_LOGS = 0.2
UNDERWAY = 4 * 2**20
"""Bytes of logs on their way: more waits in the files until these have arrived."""
CLOSE_PATIENCE = 20.0


@dataclass(frozen=True)
class CoordinatorAnswered:
    """A coordinator that was asked for is a process, then with an empty answer; listens; or says why it cannot."""

    number: int
    pid: int
    answer: dict[str, Any]
    failure: Failure | None = None


@dataclass(frozen=True)
class CoordinatorEnded:
    """It is gone."""

    number: int
    departure: str


@dataclass(frozen=True)
class WorkersEnded:
    """All workers of this host are gone, as was asked for."""


@dataclass(frozen=True)
class StorageChecked:
    """Whether this host reaches the run's storage; `reason` is why it does not."""

    reason: str


AT_ONCE = 4 * 2**20
"""Bytes that are read at once."""


@dataclass(frozen=True)
class LogLines:
    """What a process of this host has logged: whole lines, for the log of that name."""

    log: str
    text: bytes


@dataclass(frozen=True)
class AgentFailed:
    """The agent itself has failed, and has ended whatever it had."""

    reason: str


Report = Notice | LogLines | CoordinatorAnswered | CoordinatorEnded | WorkersEnded | StorageChecked | AgentFailed

EngineMaker = Callable[[RunFolder, Preparation, Network], Engine]


def local_engine(run: RunFolder, preparation: Preparation, network: Network) -> Engine:
    """What a host runs its workers on."""
    return LocalEngine(run, preparation, lambda _place: network)


class HostAgent:
    """Runs an engine in a thread of its own, which alone calls it.

    Its processes have a folder on this host in the place of the run's: what they log there is reported, and the folder
    is gone when the agent is closed.
    """

    def __init__(self, run_name: str, network: Network, make_engine: EngineMaker = local_engine) -> None:
        self._network = network
        self._make_engine = make_engine
        self._scratch = Scratch()
        self._run = RunFolder(self._scratch.path / run_name)
        self._run.logs.mkdir(parents=True)
        self._logs = LogTails(self._run.logs)
        self._engine: Engine | None = None
        self._coordinators: dict[int, tuple[CoordinatorChildProcess, threading.Thread]] = {}
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._reports: deque[tuple[int, Report]] = deque()
        self._numbers = itertools.count(1)
        self._arrived = threading.Condition()
        self._is_closed = False
        self._is_draining = False
        # Whatever it starts ends with this thread, so it ends last.
        self._thread = threading.Thread(target=self._serve, name="host", daemon=True)
        self._thread.start()

    # --- commands, from any thread; none of them waits

    def check_storage(self, place: str, nonce: str) -> None:
        """Look whether a folder here, or a store, is the launcher's, and can be written."""
        self._commands.put(lambda: self._report(StorageChecked(why_out_of_reach(place, nonce, self._network.host))))

    def prepare(self, preparation: Preparation) -> None:
        """Import the task, once."""
        self._commands.put(lambda: self._prepare(preparation))

    def start(self, assignment: Assignment) -> None:
        """Start a worker, as soon as the task is imported."""
        self._commands.put(lambda: self._start(assignment))

    def kill(self, slot: int, pid: int) -> None:
        self._commands.put(lambda: None if self._engine is None else self._engine.kill(slot, pid))

    def terminate(self, slot: int, pid: int) -> None:
        """Ask a worker to leave in good order."""
        self._commands.put(lambda: None if self._engine is None else self._engine.terminate(slot, pid))

    def end_workers(self) -> None:
        """End all workers, for good. A coordinator stays."""
        self._commands.put(self._end_workers)

    def start_coordinator(self, number: int, appointment: Mapping[str, Any]) -> None:
        """Start a coordinator; reports tell it by that number."""
        self._commands.put(lambda: self._start_coordinator(number, appointment))

    def end_coordinator(self, number: int, patience: float) -> None:
        """Let a coordinator end by itself, for so many seconds at most."""
        self._commands.put(lambda: self._end_coordinator(number, patience))

    def next(self, arrived: int, seconds: float) -> list[tuple[int, Report]]:
        """The reports after that number, each with its own; waits that long for one. Those up to it are forgotten."""
        with self._arrived:
            while self._reports and self._reports[0][0] <= arrived:
                self._reports.popleft()
            self._arrived.wait_for(lambda: self._reports or self._is_closed, seconds)
            return list(self._reports)

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
            looked = 0.0
            while not self._is_closed:
                self._carry_out()
                if self._is_draining or time.monotonic() - looked >= LOOK_AT_LOGS:
                    self._read_logs()
                    looked = time.monotonic()
        except Exception as error:
            log.exception("the host's agent has failed")
            reason = f"its agent has failed ({error!r})"
        try:
            self._end()
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

    def _prepare(self, preparation: Preparation) -> None:
        if self._engine is None:
            try:
                self._engine = self._make_engine(self._run, preparation, self._network)
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

    def _start_coordinator(self, number: int, appointment: Mapping[str, Any]) -> None:
        try:
            child = CoordinatorChildProcess(appointment, self._network)
        except OSError as error:  # its log cannot be opened where the run's storage is not reached
            reason = f"the coordinator cannot be started on host {self._network.host}: {error}"
            self._report(CoordinatorAnswered(number, 0, {}, Failure("JobError", reason)))
            self._report(CoordinatorEnded(number, reason))
            return
        # Elsewhere, since the workers of this host are looked after meanwhile.
        follower = threading.Thread(target=self._follow, args=(number, child), name="coordinator", daemon=True)
        self._coordinators[number] = child, follower
        self._report(CoordinatorAnswered(number, child.pid, {}))
        follower.start()

    def _follow(self, number: int, child: CoordinatorChildProcess) -> None:
        """In a thread of its own, so that its end is told after its answer."""
        try:
            self._report(CoordinatorAnswered(number, child.pid, child.await_answer()))
        except QuorateError as error:
            self._report(CoordinatorAnswered(number, child.pid, {}, Failure.of(error)))
        child.await_end()
        child.close(patience=0)
        self._coordinators.pop(number, None)
        self._report(CoordinatorEnded(number, child.departure))

    def _end_coordinator(self, number: int, patience: float) -> None:
        if number in self._coordinators:
            child, _ = self._coordinators[number]
            threading.Thread(target=child.let_go, args=(patience,), name="coordinator-end", daemon=True).start()

    def _read_logs(self) -> None:
        with self._arrived:
            underway = sum(len(report.text) for _, report in self._reports if isinstance(report, LogLines))
        if underway >= UNDERWAY:
            return
        is_drained = True
        for lines in self._logs.read(UNDERWAY - underway):
            is_drained = False
            self._report(lines)
        if self._is_draining and is_drained:
            self._is_draining = False
            self._report(WorkersEnded())

    def _report(self, report: Report) -> None:
        with self._arrived:
            self._reports.append((next(self._numbers), report))
            self._arrived.notify_all()

    def _end_workers(self) -> None:
        """It is said when all that they have logged is on its way."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        self._is_draining = True

    def _end(self) -> None:
        for child, follower in list(self._coordinators.values()):
            child.let_go(patience=0)
            follower.join(CLOSE_PATIENCE)
        self._end_workers()
        self._read_logs()
        self._logs.close()


PREFIX = "quorate-host-"


class Scratch:
    """A folder for as long as this process lives. What agents that were killed have left is removed by the next one
    on the same machine: a folder whose owner lives is locked."""

    def __init__(self) -> None:
        for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            descriptor = self._locked(left)
            if descriptor is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(descriptor)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            descriptor = self._locked(self.path)
            if descriptor is not None:  # otherwise another agent took it for one that was left
                self._descriptor = descriptor
                break

    @staticmethod
    def _locked(folder: Path) -> int | None:
        """The lock of a folder; None where another process has it, or there is none of ours."""
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_uid == os.getuid() and folder.exists():
                return descriptor
        except OSError:
            pass
        os.close(descriptor)
        return None

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)


class LogTails:
    """Reads on where a log is full and followed by another file, also by several."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptors: dict[str, int] = {}
        self._partial: dict[str, bytes] = {}

    def read(self, limit: int) -> Iterator[LogLines]:
        """Whole lines, of so many bytes in all or a little more."""
        # One that has just become full has no file of its name until the next line.
        for name in sorted({path.stem for path in self._folder.glob("*.jsonl")} | self._descriptors.keys()):
            while limit > 0:
                # Looked for first: only a file that is followed by another is written no more, and ends where a read
                # after that finds nothing.
                following = self._following(name)
                descriptor = self._descriptors.get(name)
                data = b"" if descriptor is None else os.read(descriptor, AT_ONCE)
                if data:
                    limit -= len(data)
                    whole, end, rest = (self._partial.get(name, b"") + data).rpartition(b"\n")
                    self._partial[name] = rest
                    if end:
                        yield LogLines(name, whole + end)
                elif following is None:
                    break
                else:
                    self._go_on_with(name, *following)

    def _following(self, name: str) -> tuple[Path, int] | None:
        """The file after the one that is read, and its inode; the oldest where that was removed or there is none."""
        try:
            parts = [(part, part.stat().st_ino) for part in parts_of(self._folder / f"{name}.jsonl")]
        except OSError:  # they are being renamed: the next look finds them
            return None
        known = self._descriptors.get(name)
        inodes = [inode for _, inode in parts]
        read = None if known is None else os.fstat(known).st_ino
        after = parts[inodes.index(read) + 1 :] if read in inodes else parts
        return next(iter(after), None)

    def _go_on_with(self, name: str, path: Path, inode: int) -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        if os.fstat(descriptor).st_ino != inode:  # renamed since
            os.close(descriptor)
            return
        known = self._descriptors.get(name)
        if known is not None:
            os.close(known)
        self._descriptors[name] = descriptor

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
