"""The local engine: one coordinator, one nursery and the workers that it forks, all on this machine."""

import contextlib
import logging
import os
import secrets
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from typing import Any

from quorate.checkpoint.store import CheckpointFolder
from quorate.coordinator.chronicle import Chronicle
from quorate.coordinator.client import Outcome, SupervisorClient, Vacancy
from quorate.core.errors import JobError, LinkError, QuorateError
from quorate.core.failure import Failure, JobFailed
from quorate.core.fault import Fault
from quorate.core.timing import Timing
from quorate.engines.coordinator_process import CoordinatorProcess
from quorate.engines.messages import EXITED, STARTED
from quorate.engines.nursery_process import NurseryProcess, Preparation
from quorate.engines.outcome_watch import OutcomeWatch
from quorate.engines.signals import Signals
from quorate.engines.sleepers import Sleepers
from quorate.observe.event import Event
from quorate.observe.jsonl import JsonlSink
from quorate.observe.tail import EventTail
from quorate.spec.job import JobSpec
from quorate.storage.run_folder import RunFolder
from quorate.training.errand import Errand
from quorate.worker.assignment import Assignment
from quorate.worker.status import Status, read_status, status_file

log = logging.getLogger(__name__)

TICK = 0.05


@dataclass(frozen=True)
class Launch:
    """A job that is ready to run in its folder."""

    run: RunFolder
    spec: JobSpec
    workers: int
    job_source: str
    checkpoint: Path | None = None
    errand: Errand = field(default_factory=Errand)
    faults: tuple[Fault, ...] = ()
    search_path: list[str] = field(default_factory=lambda: [entry or str(Path.cwd()) for entry in sys.path])


@dataclass(frozen=True)
class _Exit:
    """A worker's process that is gone, and its last word."""

    slot: int
    pid: int
    code: int
    status: Status | None

    def report_to(self, client: SupervisorClient) -> Vacancy | None:
        return client.report_exit(
            self.slot,
            self.pid,
            exit_code=self.code if self.code >= 0 else None,
            signal=-self.code if self.code < 0 else None,
            step=self.status.step if self.status else None,
            phase=self.status.phase if self.status else "",
        )


class LocalEngine:
    """Runs one job: starts its processes, passes on what happens to them, and leaves none behind."""

    def __init__(
        self,
        launch: Launch,
        show: Callable[[Event], None],
        accept_facts: Callable[[dict[str, str]], None],
        signals: Signals,
    ) -> None:
        self._launch = launch
        self._show = show
        self._accept_facts = accept_facts
        self._signals = signals
        self._timing = Timing(launch.spec.failure_timeout)
        self._token = secrets.token_urlsafe(32)
        self._tail = EventTail(launch.run.events_file)
        self._tail.read_new()  # what an earlier part of the run has told is not news
        self._running: dict[int, int] = {}
        self._exits: deque[_Exit] = deque()
        self._refills: dict[int, tuple[float, Vacancy]] = {}
        self._deserted_since: float | None = None
        self._has_formed = False
        self._sleepers = Sleepers(launch.faults, launch.run.logs)

    def run(self) -> Outcome:
        """Run the job to its end."""
        logs = self._launch.run.logs
        try:
            with contextlib.ExitStack() as stack:
                # It does so itself, unless it was killed.
                stack.callback(self._launch.run.remove_address)
                coordinator = CoordinatorProcess(logs / "coordinator.log", self._appointment())
                stack.callback(coordinator.close, patience=self._timing.failure_timeout)
                nursery = NurseryProcess(logs / "nursery.log", self._preparation())
                stack.callback(nursery.close)
                # Asked first, while torch is being imported: a port in use is told at once.
                address = coordinator.address()
                client = SupervisorClient(address, self._token, timeout=self._timing.failure_timeout)
                stack.callback(client.close)
                return self._attend(coordinator, nursery, client, address)
        finally:
            self._show_events()

    def _attend(
        self, coordinator: CoordinatorProcess, nursery: NurseryProcess, client: SupervisorClient, address: str
    ) -> Outcome:
        """Supervise, and see to it that the run's events tell what ended it, also when no worker can."""
        try:
            facts = nursery.await_ready(give_up=lambda: self._signals.reason is not None)
            if facts is None:
                client.stop(self._signals.reason or "interrupted")
                return Outcome(None, {"ending": self._signals.reason})
            self._accept_facts(facts)
            with contextlib.closing(OutcomeWatch(client)) as watch:
                return self._supervise(coordinator, nursery, client, watch, address)
        except QuorateError as error:
            self._write_down(Failure.of(error), coordinator, client)
            raise

    def _write_down(self, failure: Failure, coordinator: CoordinatorProcess, client: SupervisorClient) -> None:
        with contextlib.suppress(LinkError):
            if coordinator.is_alive:
                client.report_failure(failure)
                return
        # The run's events are the coordinator's to write, unless it cannot any more.
        with contextlib.closing(Chronicle(JsonlSink(self._launch.run.events_file))) as chronicle:
            chronicle.job_failed(failure)

    def _supervise(
        self,
        coordinator: CoordinatorProcess,
        nursery: NurseryProcess,
        client: SupervisorClient,
        watch: OutcomeWatch,
        address: str,
    ) -> Outcome:
        for slot in range(self._launch.workers):
            status_file(self._launch.run, slot).unlink(missing_ok=True)  # the last word of an earlier part of the run
            nursery.start(self._assignment(slot, address, self._launch.checkpoint))
        asked = False
        while watch.outcome is None:
            self._look_after(nursery, client)
            self._report_exits(client)
            self._expel(watch)
            self._sleepers.wake_those_due(self._running, time.monotonic())
            self._refill(nursery, address)
            self._show_events()
            if self._is_ordered_to_end():
                raise JobFailed(_stopped_at_once(self._signals, self._launch.errand))
            if not coordinator.is_alive:
                raise JobFailed(self._lost(coordinator.departure))
            if self._is_deserted():
                raise JobFailed(self._lost("the coordinator has kept silent about the end of every worker"))
            if self._signals.reason and not asked:
                asked = True
                with contextlib.suppress(LinkError):  # a coordinator that is gone is seen in the next round
                    client.stop(self._signals.reason)
                if not self._has_formed:  # nothing is trained yet that would have to be saved
                    return Outcome(None, {"ending": self._signals.reason})
        self._let_workers_leave(nursery, watch.outcome)
        return watch.outcome

    def _look_after(self, nursery: NurseryProcess, client: SupervisorClient) -> None:
        try:
            for message in nursery.poll(TICK):
                self._note(message, client)
        except JobError as error:
            raise JobFailed(self._lost(error.message)) from None

    def _is_ordered_to_end(self) -> bool:
        """Whether to wait for nothing: by the second signal, or by the first where there is nothing to save."""
        asked = self._signals.reason is not None
        return self._signals.at_once or (asked and not self._launch.errand.is_training)

    def _is_deserted(self) -> bool:
        """Whether a coordinator that hangs has kept silent about the end of all its workers."""
        since = self._deserted_since
        return since is not None and time.monotonic() - since > 2 * self._timing.failure_timeout

    def _lost(self, what: str) -> Failure:
        """Why a job ends that has lost a process which is no worker."""
        pages = [read_status(status_file(self._launch.run, slot)) for slot in range(self._launch.workers)]
        step = max((page.step for page in pages if page is not None), default=0) or None
        where = f" at step {step}" if step else " before the first step"
        message = f"{what}{where}; the job cannot go on without it. Its log is in {self._launch.run.logs}."
        return Failure("ProcessLost", message, step=step)

    def _note(self, message: dict[str, Any], client: SupervisorClient | None) -> None:
        slot, pid = message["slot"], message["pid"]
        if message["what"] == STARTED:
            self._running[slot] = pid
            self._deserted_since = None
            reason = f" ({message['reason']})" if message["reason"] else ""
            log.info("worker %d is process %d, %s%s", slot, pid, message["how"], reason)
        elif message["what"] == EXITED:
            self._running.pop(slot, None)
            self._deserted_since = None if self._running else time.monotonic()
            if client is not None:
                self._exits.append(_Exit(slot, pid, message["code"], read_status(status_file(self._launch.run, slot))))
                self._report_exits(client)

    def _report_exits(self, client: SupervisorClient) -> None:
        """Tell the coordinator of every process that is gone, again if it did not answer: it says who is replaced."""
        while self._exits:
            exited = self._exits[0]
            try:
                vacancy = exited.report_to(client)
            except LinkError as error:
                log.info("the exit of worker %d could not be reported: %s", exited.slot, error)
                return
            self._exits.popleft()
            if vacancy is not None:
                self._refills[exited.slot] = time.monotonic() + vacancy.after, vacancy
                self._deserted_since = None

    def _refill(self, nursery: NurseryProcess, address: str) -> None:
        """Start those whose time has come."""
        for slot, (due, vacancy) in list(self._refills.items()):
            if time.monotonic() >= due:
                del self._refills[slot]
                log.info("worker %d is started again", slot)
                nursery.start(self._assignment(slot, address, self._newest() if vacancy.restore else None))

    def _newest(self) -> Path | None:
        newest = CheckpointFolder(self._launch.run.checkpoints).newest_whole()
        return self._launch.checkpoint if newest is None else newest.path

    def _expel(self, watch: OutcomeWatch) -> None:
        """Kill what counts as lost: a process that was only stopped must not wake up and go on."""
        with contextlib.suppress(Empty):
            while True:
                slot, pid = watch.expelled.get_nowait()
                if self._running.get(slot) == pid:
                    log.info("worker %d (pid %d) counts as lost, and is killed", slot, pid)
                    os.kill(pid, signal.SIGKILL)

    def _let_workers_leave(self, nursery: NurseryProcess, outcome: Outcome) -> None:
        """They have been told of the end; whoever does not leave in time is killed with the nursery."""
        is_complete = outcome.failure is None and outcome.result.get("steps")
        patience = self._timing.failure_timeout if is_complete else min(self._timing.failure_timeout, 1.0)
        over = time.monotonic() + patience
        while self._running and time.monotonic() < over and not self._signals.at_once:
            for message in nursery.poll(TICK):
                self._note(message, None)

    def _show_events(self) -> None:
        for event in self._tail.read_new():
            self._has_formed = self._has_formed or event.kind == "generation"
            self._show(event)

    def _appointment(self) -> dict[str, Any]:
        spec = self._launch.spec
        return {
            "run": str(self._launch.run.path),
            "lanes": spec.lanes,
            "workers": self._launch.workers,
            # An errand aside may have fewer workers than the job.
            "min_workers": min(spec.min_workers, self._launch.workers),
            "failure_timeout": spec.failure_timeout,
            "step_timeout": spec.step_timeout,
            "token": self._token,
            "port": spec.port,
            "log_level": spec.log_level,
        }

    def _preparation(self) -> Preparation:
        spec = self._launch.spec
        return Preparation(
            task=spec.task,
            params=spec.params,
            job_source=self._launch.job_source,
            search_path=self._launch.search_path,
            seed=spec.seed,
            threads=spec.threads,
            deterministic=spec.deterministic,
        )

    def _assignment(self, slot: int, address: str, checkpoint: Path | None) -> Assignment:
        launch = self._launch
        return Assignment(
            run=str(launch.run.path),
            slot=slot,
            workers=launch.workers,
            task=launch.spec.task,
            job=launch.spec.model_dump(mode="json"),
            job_source=launch.job_source,
            coordinator=address,
            token=self._token,
            checkpoint=None if checkpoint is None else str(checkpoint),
            errand=launch.errand,
            faults=launch.faults,
        )


def _stopped_at_once(signals: Signals, errand: Errand) -> Failure:
    message = "stopped at once, by the second signal; the checkpoints so far are kept."
    if not errand.is_training:
        message = f"{signals.reason}; the run is as it was."
    return signals.failure(message)
