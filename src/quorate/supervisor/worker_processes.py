"""The workers' processes as their supervisor knows them: one for each place, and another when it is gone."""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quorate.coordinator.client import SupervisorClient
from quorate.coordinator.events import Reading
from quorate.coordinator.places import News, Vacancy
from quorate.core.errors import JobError, LinkError
from quorate.core.failure import Failure, JobFailed
from quorate.core.generation import name_of, names_of
from quorate.engines.engine import (
    Engine,
    Exited,
    Interrupted,
    Notice,
    Prepared,
    Ready,
    Remark,
    SettingUp,
    Started,
    Unprepared,
)
from quorate.supervisor.coordinator_process import Process
from quorate.worker.assignment import Assignment
from quorate.worker.status import STARTING

log = logging.getLogger(__name__)

TICK = 0.05
HASTE = 0.005
"""Seconds between two looks while the coordinator is about to say who takes the place of one that is gone..."""
HASTE_LASTS = 0.5
"""...which is so many seconds after it was told."""
SETUP_GLANCE = 0.5
"""Seconds between two looks at how far those are who are being set up."""
SETUP_TIMEOUT = "SetupTimeout"
MOST_INTERRUPTIONS = 5
"""So many times in a row may an engine fail without a step in between."""
FIRST_NOTICE = 15.0
"""Seconds in one phase before users are notified; again after three times as long, and so on."""
TIMES_LONGER = 3
LONGEST_GAP = 3600.0
"""Seconds between two notices at most."""

FORK_SERVER = -1
"""In the place of a worker: the process that imports torch and the task for all of them."""
IMPORTING = ""
"""The phase of a process that has not said anything yet."""

_WORDS = {
    IMPORTING: ("the import of torch and the task", "importing torch and the task"),
    "start": ("its start", "starting"),
    "build": ("its start", "starting"),
    "restore": ("the loading of its checkpoint", "loading the checkpoint"),
    "fingerprint": ("the fingerprint of its data", "reading the data once for its fingerprint"),
    "metrics()": ("a trial of metrics()", "trying metrics()"),
    "compile": (
        "the compilation of its model, which takes a minute the first time",
        "compiling the model, which takes a minute the first time",
    ),
    "register": ("its registration with the coordinator", "registering with the coordinator"),
}
"""By phase of a setup: how a sentence names it, and what a job is busy with meanwhile."""


class EngineLost(JobError):  # noqa: N818 (a happening, not a mistake)
    """An engine has failed again and again, and its workers with it."""


@dataclass(frozen=True)
class Setup:
    """One process on its way: since when, in which phase, since when in that, and when the next notice is due."""

    worker: int
    pid: int
    began: float
    phase: str
    entered: float
    notice_at: float

    def overdue(self, now: float, limit: float) -> str:
        """What is wrong with a setup that takes longer than the user allows."""
        who = _name([self.worker]) + (f" (pid {self.pid})" if self.pid else "")
        return (
            f"{who} is still in {_in_words(self.phase)[0]}, {now - self.began:.0f} s after its start. That is longer"
            f" than setup_timeout ({limit})"
        )


class SetupWatch:
    """Looked at now and then, with the time and the phase of every process that is being set up, by worker and pid.

    Users are notified while it takes long, and only `setup_timeout` ends it: downloading or tokenising a dataset may
    take hours, and nobody but the user knows how many.
    """

    def __init__(self, limit: float | None = None) -> None:
        self.limit = limit
        self._setups: dict[tuple[int, int], Setup] = {}

    def look(self, now: float, phases: Mapping[tuple[int, int], str]) -> list[str]:
        """The notices that are due; those in the same phase share one."""
        known, self._setups = self._setups, {}
        for process, phase in phases.items():
            setup = known.get(process) or Setup(*process, now, phase, now, now + FIRST_NOTICE)
            if setup.phase != phase:
                setup = replace(setup, phase=phase, entered=now, notice_at=now + FIRST_NOTICE)
            self._setups[process] = setup
        due = [setup for setup in self._setups.values() if now >= setup.notice_at]
        notices = []
        for phase in dict.fromkeys(setup.phase for setup in due):
            alike = [setup for setup in self._setups.values() if setup.phase == phase]
            seconds = now - min(setup.entered for setup in alike)
            notices.append(
                f"{_name([setup.worker for setup in alike])}: still in {_in_words(phase)[0]}, {seconds:.0f} s"
            )
            for setup in alike:  # the longer it takes, the longer until the next
                gap = min((TIMES_LONGER - 1) * (now - setup.entered), LONGEST_GAP)
                self._setups[setup.worker, setup.pid] = replace(setup, notice_at=now + gap)
        return notices

    def overdue(self, now: float) -> list[Setup]:
        """Those that take longer than the user allows."""
        return [setup for setup in self._setups.values() if self.limit is not None and now - setup.began >= self.limit]


def _in_words(phase: str) -> tuple[str, str]:
    """What the task defines has its own name."""
    return _WORDS.get(phase, (phase, f"running {phase}"))


def _name(workers: list[int]) -> str:
    return "the fork server" if workers == [FORK_SERVER] else names_of(workers)


class WorkerProcesses:
    """Starts workers on an engine, tells the coordinator who is gone, and fills the places that it names."""

    def __init__(
        self,
        engine: Engine,
        assign: Callable[[int, Path | None, bool], Assignment],
        notify: Callable[[str], None] = lambda _message: None,
        setup_timeout: float | None = None,
        has_formed: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._assign = assign
        self._notify = notify
        self._setup = SetupWatch(setup_timeout)
        self._has_formed = has_formed
        self._clock = clock
        self._setup_due = 0.0
        self._interruptions = 0
        self._prepared: Prepared | None = None
        self.running: dict[int, int] = {}
        self._killed: dict[int, int] = {}
        self._starting: set[int] = set()
        # Of those who are being set up, the phase; and who is done with it.
        self._phases: dict[Process, str] = {}
        self._set_up: set[Process] = set()
        self._exited: deque[Exited] = deque()
        self._reported = -HASTE_LASTS
        self._vacant: dict[int, tuple[float, Vacancy]] = {}

    def await_ready(self, give_up: Callable[[], bool]) -> Prepared | None:
        """What the engine has found of machine and task, once it has; None when given up."""
        while self._prepared is None and not give_up():
            for notice in self._engine.poll(TICK):
                if isinstance(notice, Unprepared):
                    raise notice.failure.error()
                if isinstance(notice, Interrupted):
                    raise JobError(notice.reason)
                self._note(notice)
            self._watch_setup({(FORK_SERVER, 0): IMPORTING})
        return self._prepared

    def start(self, slot: int, checkpoint: Path | None, *, is_replacement: bool = False) -> None:
        """Have a worker in a place, from a checkpoint or from the beginning."""
        self._starting.add(slot)
        self._engine.start(self._assign(slot, checkpoint, is_replacement))

    def look(self, seconds: float = TICK) -> None:
        """Learn what has happened to the processes; waits that long for something to happen, or shorter where the
        coordinator is about to have something done."""
        is_awaiting_news = self._clock() - self._reported < HASTE_LASTS
        for notice in self._engine.poll(min(seconds, HASTE) if is_awaiting_news else seconds):
            self._note(notice)
        if self._clock() >= self._setup_due:
            unstarted = dict.fromkeys(((slot, 0) for slot in self._starting), IMPORTING)
            # Who is there and has said nothing, for on a full disk it has no page: nobody trains before the first
            # generation, and later on it may have for days.
            mute = set() if self._has_formed() else self.running.items() - self._phases.keys() - self._set_up
            self._watch_setup(unstarted | dict.fromkeys(mute, STARTING))

    def _watch_setup(self, unstarted: dict[Process, str]) -> None:
        """Say what a setup that takes long is at; end one that takes longer than the user allows."""
        now = self._clock()
        if now < self._setup_due:
            return
        self._setup_due = now + SETUP_GLANCE
        for message in self._setup.look(now, unstarted | self._phases):
            self._notify(message)
        if (limit := self._setup.limit) is not None:
            for setup in self._setup.overdue(now):
                self._end_setup(setup, setup.overdue(now, limit))

    def _end_setup(self, setup: Setup, why: str) -> None:
        """Others may train meanwhile: only where nobody can does it end the job.

        That is before the first generation, and where another fork server imports the task that all workers wait for.
        """
        if not self._has_formed() or not (setup.pid or self.running):
            remedy = "Raise setup_timeout, or leave it out to wait for as long as it takes."
            worker = None if setup.worker == FORK_SERVER else setup.worker
            raise JobFailed(Failure(SETUP_TIMEOUT, f"{why}. {remedy}", worker=worker, phase=setup.phase))
        if setup.pid and self._killed.get(setup.worker) != setup.pid:
            self._notify(f"{why}: it is ended, and another is started.")
            self._kill(setup.worker, setup.pid)

    def report(self, client: SupervisorClient) -> None:
        """Tell the coordinator of every process that is gone, again if it did not answer."""
        while self._exited:
            exited = self._exited[0]
            status = exited.status
            try:
                client.report_exit(
                    exited.slot,
                    exited.pid,
                    exit_code=exited.code if exited.code >= 0 else None,
                    signal=-exited.code if exited.code < 0 else None,
                    step=None if status is None else status.step,
                    phase="" if status is None else status.phase,
                    reading=None
                    if status is None or status.lane is None
                    else Reading(status.lane, status.epoch or 0, status.samples, status.sample_count),
                )
            except LinkError as error:
                log.info("the exit of %s could not be reported: %s", name_of(exited.slot), error)
                return
            self._exited.popleft()
            self._reported = self._clock()

    @property
    def doing(self) -> str:
        """What those are busy with who are being set up: the first of them speaks for all."""
        if self._prepared is None:
            return _in_words(IMPORTING)[1]
        if self._phases:
            return _in_words(self._phases[min(self._phases)])[1]
        return "starting the workers" if self._starting else "connecting the workers"

    def processes(self) -> set[Process]:
        """Those that there are, will be (with the pid 0), or have been and are yet to be reported.

        Also called from another thread, so from copies: what is walked through must not change meanwhile.
        """
        coming = {(slot, 0) for slot in [*self._starting, *self._vacant]}
        return coming | set(dict(self.running).items()) | {(one.slot, one.pid) for one in list(self._exited)}

    def handle(self, news: News) -> None:
        """End who counts as lost, and have somebody in every place that nobody has or is on the way to."""
        for slot, pid in news.expelled:
            self._kill(slot, pid)
        for slot, vacancy in news.vacant.items():
            if slot not in {slot for slot, _ in self.processes()}:
                self._vacant[slot] = self._clock() + vacancy.after, vacancy

    def refill(self, newest: Callable[[], Path | None]) -> None:
        """Start those whose time has come; from the newest checkpoint where nobody is left to copy from."""
        for slot, (due, vacancy) in list(self._vacant.items()):
            if self._clock() >= due:
                del self._vacant[slot]
                checkpoint = newest() if vacancy.restore else None
                if checkpoint is None:
                    log.info("%s is started again", name_of(slot))
                else:
                    log.warning("%s is started from %s: nobody holds a newer state", name_of(slot), checkpoint.name)
                self.start(slot, checkpoint, is_replacement=True)

    def _kill(self, slot: int, pid: int) -> None:
        """One that was only stopped must not wake up and go on. It is told again until it has been reaped."""
        if self.running.get(slot) == pid and self._killed.get(slot) != pid:
            self._killed[slot] = pid
            log.info("%s (pid %d) counts as lost, and is killed", name_of(slot), pid)
            self._engine.kill(slot, pid)

    def roster(self) -> dict[str, Any]:
        """Who is there, and where somebody is on the way, as the next coordinator is told."""
        self.look(0)  # whoever has just been started is there
        known = set(self.running.items()) & self._set_up
        new = {slot for slot, _ in set(self.running.items()) - known}
        unreported = {(exited.slot, exited.pid) for exited in self._exited}
        return {
            "present": sorted(known | unreported),
            "awaited": sorted(self._starting | self._vacant.keys() | new),
        }

    def note_step(self) -> None:
        """The job advances: what has happened to the engine before has not kept it from that."""
        self._interruptions = 0

    def let_leave(self, seconds: float, at_once: Callable[[], bool]) -> None:
        """Wait until all have left; whoever does not in time is killed when the engine is closed."""
        over = self._clock() + seconds
        while self.running and self._clock() < over and not at_once():
            for notice in self._engine.poll(TICK):
                if isinstance(notice, Interrupted):  # it takes with it only who is to leave
                    return
                self._note(notice)

    def _note(self, notice: Notice) -> None:
        match notice:
            case Ready(prepared):
                self._prepared = prepared
            case Started(slot, pid, how):
                self._starting.discard(slot)
                self.running[slot] = pid
                log.info("%s is process %d, %s", name_of(slot), pid, how)
            case SettingUp(slot, pid, str() as phase):
                self._phases[slot, pid] = phase
            case SettingUp(slot, pid, None):
                self._phases.pop((slot, pid), None)
                self._set_up.add((slot, pid))
            case Exited(slot, pid):
                self.running.pop(slot, None)
                self._phases.pop((slot, pid), None)
                self._set_up.discard((slot, pid))
                self._exited.append(notice)
            case Unprepared(failure):
                raise JobFailed(failure)
            case Remark(message):
                self._notify(message)
            case Interrupted(reason):
                self._interruptions += 1
                if self._interruptions > MOST_INTERRUPTIONS:
                    raise EngineLost(reason)
                log.warning("%s; another takes its place", reason)
