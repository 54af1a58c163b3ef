"""The workers' processes as their supervisor knows them: one for each place, and another when it is gone."""

import logging
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quorate.coordinator.client import News, SupervisorClient, Vacancy
from quorate.coordinator.events import Reading
from quorate.core.errors import LinkError
from quorate.core.failure import Failure, JobFailed
from quorate.engines.fork_server_process import ForkServerLost, ForkServerProcess, Prepared
from quorate.engines.log_keeper import LogKeeper
from quorate.engines.messages import EXITED, FAILED, STARTED
from quorate.engines.setup_watch import FORK_SERVER, IMPORTING, Setup, SetupWatch
from quorate.storage.run_folder import RunFolder
from quorate.worker.assignment import Assignment
from quorate.worker.status import Status, read_status, status_file

log = logging.getLogger(__name__)

TICK = 0.05
SETUP_GLANCE = 0.5
"""Seconds between two looks at how far those are who are being set up."""
SETUP_TIMEOUT = "SetupTimeout"
MOST_FORK_SERVERS = 5
"""So many fork_servers in a row may die without a step in between."""


@dataclass(frozen=True)
class Departed:
    """A worker's process that is gone, and its last word."""

    slot: int
    pid: int
    code: int
    status: Status | None

    def report_to(self, client: SupervisorClient) -> Vacancy | None:
        """Tell the coordinator; whether another shall take its place."""
        return client.report_exit(
            self.slot,
            self.pid,
            exit_code=self.code if self.code >= 0 else None,
            signal=-self.code if self.code < 0 else None,
            step=self.status.step if self.status else None,
            phase=self.status.phase if self.status else "",
            reading=_reading(self.status) if self.status else None,
        )


def _reading(status: Status) -> Reading | None:
    if status.lane is None:
        return None
    return Reading(status.lane, status.epoch or 0, status.samples, status.sample_count)


class WorkerProcesses:
    """Starts workers by a fork server, and by the next fork_server if one dies; workers die with theirs."""

    def __init__(
        self,
        run: RunFolder,
        open_fork_server: Callable[[], ForkServerProcess],
        assign: Callable[[int, Path | None, bool], Assignment],
        tell: Callable[[str], None] = lambda _message: None,
        setup_timeout: float | None = None,
        has_formed: Callable[[], bool] = lambda: False,
    ) -> None:
        self._run = run
        self._logs = LogKeeper(run.logs)
        self._open_fork_server = open_fork_server
        self._assign = assign
        self._tell = tell
        self._setup = SetupWatch(setup_timeout)
        self._has_formed = has_formed
        self._setup_due = 0.0
        self._fork_server = open_fork_server()
        self._deaths = 0
        self.running: dict[int, int] = {}
        self._killed: dict[int, int] = {}
        self._starting: dict[int, Assignment] = {}
        self._departed: deque[Departed] = deque()
        self._vacant: dict[int, tuple[float, Vacancy]] = {}

    def await_ready(self, give_up: Callable[[], bool]) -> Prepared | None:
        """What is known of machine and task, once it is; None when given up."""

        def look() -> bool:
            self._logs.keep(time.monotonic())
            self._watch_setup(time.monotonic(), lambda: {(FORK_SERVER, 0): IMPORTING})
            return give_up()

        return self._fork_server.await_ready(look)

    def start(self, slot: int, checkpoint: Path | None, *, is_replacement: bool = False) -> None:
        """Have a worker in a place, from a checkpoint or from the beginning."""
        self._starting[slot] = assignment = self._assign(slot, checkpoint, is_replacement)
        status_file(self._run, slot).unlink(missing_ok=True)  # the last word of whoever was there before
        self._fork_server.start(assignment)

    def look(self, seconds: float) -> None:
        """Learn what has happened to the processes; waits that long for something to happen."""
        self._logs.keep(time.monotonic())
        try:
            for message in self._fork_server.poll(seconds):
                self._note(message)
        except ForkServerLost as error:
            self._lose_fork_server(error.message)
        self._watch_setup(time.monotonic(), self._phases)

    def _phases(self) -> dict[tuple[int, int], str]:
        """Of those who are being set up, by place and pid.

        Who is there and says nothing may have trained for days: on a full disk there is no page to say it on.
        """
        coming = dict.fromkeys(((slot, 0) for slot in self._starting), IMPORTING)
        read = {(slot, pid): read_status(status_file(self._run, slot)) for slot, pid in self.running.items()}
        return coming | {who: status.phase for who, status in read.items() if status is not None and status.is_new}

    def _watch_setup(self, now: float, phases: Callable[[], dict[tuple[int, int], str]]) -> None:
        """Say what a setup that takes long is at; end one that takes longer than the user allows."""
        if now < self._setup_due:
            return
        self._setup_due = now + SETUP_GLANCE
        for message in self._setup.look(now, phases()):
            self._tell(message)
        for setup in self._setup.overdue(now):
            self._end_setup(setup, setup.overdue(now, self._setup.limit or 0.0))

    def _end_setup(self, setup: Setup, why: str) -> None:
        """Others may train meanwhile: only where nobody can does it end the job.

        That is before the first generation, and where another fork server imports the task that all workers wait for.
        """
        if not self._has_formed() or not (setup.pid or self.running):
            remedy = "Raise setup_timeout, or leave it out to wait for as long as it takes."
            worker = None if setup.worker == FORK_SERVER else setup.worker
            raise JobFailed(Failure(SETUP_TIMEOUT, f"{why}. {remedy}", worker=worker, phase=setup.phase))
        if setup.pid and self._killed.get(setup.worker) != setup.pid:
            self._tell(f"{why}: it is ended, and another is started.")
            self._kill(setup.worker, setup.pid)

    def report(self, client: SupervisorClient) -> None:
        """Tell the coordinator of every process that is gone, again if it did not answer: it says who is replaced."""
        while self._departed:
            departed = self._departed[0]
            try:
                vacancy = departed.report_to(client)
            except LinkError as error:
                log.info("the exit of worker %d could not be reported: %s", departed.slot, error)
                return
            self._departed.popleft()
            if vacancy is not None:
                self._vacant[departed.slot] = time.monotonic() + vacancy.after, vacancy

    def seen_to(self) -> set[int]:
        """Places that have a process, or will have one, or whose process has yet to be told of."""
        departed = {one.slot for one in list(self._departed)}
        return {*list(self.running), *list(self._starting), *list(self._vacant), *departed}

    def heed(self, news: News) -> None:
        """End who counts as lost, and have somebody in a place where nobody is on the way."""
        for slot, pid in news.expelled:
            self._kill(slot, pid)
        for slot, vacancy in news.vacant.items():
            if slot not in self.seen_to():
                self._vacant[slot] = time.monotonic() + vacancy.after, vacancy

    def refill(self, newest: Callable[[], Path | None]) -> None:
        """Start those whose time has come; from the newest checkpoint where nobody is left to copy from."""
        for slot, (due, vacancy) in list(self._vacant.items()):
            if time.monotonic() >= due:
                del self._vacant[slot]
                log.info("worker %d is started again", slot)
                self.start(slot, newest() if vacancy.restore else None, is_replacement=True)

    def _kill(self, slot: int, pid: int) -> None:
        """One that was only stopped must not wake up and go on. It is told again until it has been reaped."""
        if self.running.get(slot) == pid and self._killed.get(slot) != pid:
            self._killed[slot] = pid
            log.info("worker %d (pid %d) counts as lost, and is killed", slot, pid)
            self._fork_server.kill(pid)

    def roster(self) -> dict[str, Any]:
        """Who is there, and where somebody is on the way, as the next coordinator is told."""
        self.look(0)  # whoever has just been started is there
        new = {slot for slot in self.running if self._is_new(slot)}
        known = [(slot, pid) for slot, pid in self.running.items() if slot not in new]
        unreported = [(departed.slot, departed.pid) for departed in self._departed]
        return {
            "present": [*known, *unreported],
            "awaited": sorted(self._starting.keys() | self._vacant.keys() | new),
        }

    def _is_new(self, slot: int) -> bool:
        """Whether no coordinator has heard of the worker in this place yet."""
        status = read_status(status_file(self._run, slot))
        return status is None or status.is_new

    def note_step(self) -> None:
        """The job advances: the fork_servers that died before have not kept it from that."""
        self._deaths = 0

    def let_leave(self, seconds: float, at_once: Callable[[], bool]) -> None:
        """Wait until all have left; whoever does not in time is killed with the fork server."""
        over = time.monotonic() + seconds
        while self.running and time.monotonic() < over and not at_once():
            for message in self._fork_server.poll(TICK):
                self._note(message)

    def close(self) -> None:
        """End whoever is left, and wait until they are gone."""
        self._fork_server.close()

    def _note(self, message: dict[str, Any]) -> None:
        if message["what"] == STARTED:
            self._note_start(message)
        elif message["what"] == EXITED:
            self.running.pop(message["slot"], None)
            self._depart(message["slot"], message["pid"], message["code"])
        elif message["what"] == FAILED:
            raise JobFailed(Failure.from_dict(message["failure"]))

    def _note_start(self, message: dict[str, Any]) -> None:
        slot, pid = message["slot"], message["pid"]
        self._starting.pop(slot, None)
        self.running[slot] = pid
        reason = f" ({message['reason']})" if message["reason"] else ""
        log.info("worker %d is process %d, %s%s", slot, pid, message["how"], reason)

    def _depart(self, slot: int, pid: int, code: int) -> None:
        self._departed.append(Departed(slot, pid, code, read_status(status_file(self._run, slot))))

    def _lose_fork_server(self, why: str) -> None:
        """Its workers have gone with it; another starts those who take their places."""
        self._deaths += 1
        if self._deaths > MOST_FORK_SERVERS:
            raise ForkServerLost(why)
        log.warning("%s; another takes its place", why)
        self._fork_server.close()
        for slot, pid in self.running.items():
            self._depart(slot, pid, -signal.SIGKILL)
        self.running.clear()
        self._fork_server = self._open_fork_server()
        for assignment in self._starting.values():
            self._fork_server.start(assignment)
