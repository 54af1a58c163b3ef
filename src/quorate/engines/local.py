"""The local engine: one coordinator, one nursery and the workers that it forks, all on this machine."""

import logging
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quorate.coordinator.client import Outcome, SupervisorClient
from quorate.core.errors import JobError, LinkError
from quorate.core.failure import Failure
from quorate.core.timing import Timing
from quorate.engines.coordinator_process import CoordinatorProcess
from quorate.engines.messages import EXITED, STARTED
from quorate.engines.nursery_process import NurseryProcess, Preparation
from quorate.observe.event import Event
from quorate.observe.tail import EventTail
from quorate.spec.job import JobSpec
from quorate.storage.run_folder import RunFolder
from quorate.worker.assignment import Assignment
from quorate.worker.status import read_status, status_file

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
    search_path: list[str] = field(default_factory=lambda: [entry for entry in sys.path if entry])


@dataclass
class Signals:
    """How often the user has asked for an end: once is a request, twice is an order."""

    received: list[int] = field(default_factory=list)

    @property
    def reason(self) -> str | None:
        """What the job is told."""
        if not self.received:
            return None
        return "terminated" if self.received[0] == signal.SIGTERM else "interrupted"

    @property
    def at_once(self) -> bool:
        """Whether to wait no longer."""
        return len(self.received) > 1


@contextmanager
def listening_to_signals() -> Iterator[Signals]:
    """Handlers only set a flag. Outside the main thread there is nothing to listen to."""
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    before = {
        number: signal.signal(number, lambda received, _: signals.received.append(received))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class LocalEngine:
    """Runs one job: starts its processes, passes on what happens to them, and leaves none behind."""

    def __init__(
        self, launch: Launch, show: Callable[[Event], None], check_facts: Callable[[dict[str, str]], None]
    ) -> None:
        self._launch = launch
        self._show = show
        self._check_facts = check_facts
        self._timing = Timing(launch.spec.failure_timeout)
        self._token = secrets.token_urlsafe(32)
        self._tail = EventTail(launch.run.events_file)
        self._tail.read_new()  # what an earlier part of the run has told is not news
        self._running: dict[int, int] = {}

    def run(self) -> Outcome:
        """Run the job to its end."""
        launch = self._launch
        coordinator = CoordinatorProcess(launch.run.logs / "coordinator.log", self._coordinator_assignment())
        try:
            nursery = NurseryProcess(launch.run.logs / "nursery.log", self._preparation())
            try:
                with listening_to_signals() as signals:
                    facts = nursery.await_ready(give_up=lambda: signals.reason is not None)
                    if facts is None:
                        return Outcome(None, {"ending": signals.reason})
                    self._check_facts(facts)
                    return self._supervise(coordinator, nursery, signals)
            finally:
                nursery.close()
        finally:
            coordinator.close(patience=self._timing.failure_timeout)
            self._show_events()

    def _supervise(self, coordinator: CoordinatorProcess, nursery: NurseryProcess, signals: Signals) -> Outcome:
        address = coordinator.address()
        client = SupervisorClient(address, self._token)
        try:
            for slot in range(self._launch.workers):
                nursery.start(self._assignment(slot, address))
            waiting = _Waiting(client)
            asked = False
            while waiting.outcome is None:
                for message in nursery.poll(TICK):
                    self._note(message, client)
                self._show_events()
                if signals.at_once:
                    return Outcome(_stopped_at_once(), {})
                if signals.reason and not asked:
                    asked = True
                    client.stop(signals.reason)
                if not coordinator.is_alive:
                    raise JobError(
                        f"The coordinator process ended; the job cannot go on. "
                        f"See {self._launch.run.logs / 'coordinator.log'}."
                    )
            self._let_workers_leave(nursery)
            return waiting.outcome
        finally:
            client.close()

    def _note(self, message: dict[str, Any], client: SupervisorClient | None) -> None:
        slot, pid = message["slot"], message["pid"]
        if message["what"] == STARTED:
            self._running[slot] = pid
            reason = f" ({message['reason']})" if message["reason"] else ""
            log.info("worker %d is process %d, %s%s", slot, pid, message["how"], reason)
        elif message["what"] == EXITED:
            self._running.pop(slot, None)
            if client is not None:
                self._report_exit(client, slot, pid, message["code"])

    def _report_exit(self, client: SupervisorClient, slot: int, pid: int, code: int) -> None:
        status = read_status(status_file(self._launch.run, slot))
        try:
            client.report_exit(
                slot,
                pid,
                exit_code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
                step=status.step if status else None,
                phase=status.phase if status else "",
            )
        except LinkError as error:
            log.warning("the exit of worker %d could not be reported: %s", slot, error)

    def _let_workers_leave(self, nursery: NurseryProcess) -> None:
        """They have been told of the end; whoever does not leave in time is killed with the nursery."""
        over = time.monotonic() + self._timing.failure_timeout
        while self._running and time.monotonic() < over:
            for message in nursery.poll(TICK):
                self._note(message, None)

    def _show_events(self) -> None:
        for event in self._tail.read_new():
            self._show(event)

    def _coordinator_assignment(self) -> dict[str, Any]:
        spec = self._launch.spec
        return {
            "run": str(self._launch.run.path),
            "lanes": spec.lanes,
            "workers": self._launch.workers,
            "failure_timeout": spec.failure_timeout,
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
            threads=spec.threads,
            deterministic=spec.deterministic,
        )

    def _assignment(self, slot: int, address: str) -> Assignment:
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
            checkpoint=None if launch.checkpoint is None else str(launch.checkpoint),
        )


class _Waiting:
    """Asks the coordinator for the outcome, beside the loop that looks after the processes."""

    def __init__(self, client: SupervisorClient) -> None:
        self._client = client
        self.outcome: Outcome | None = None
        threading.Thread(target=self._wait, name="outcome", daemon=True).start()

    def _wait(self) -> None:
        while self.outcome is None:
            try:
                self.outcome = self._client.outcome(timeout=30.0)
            except LinkError:
                return  # the client was closed, or the coordinator is gone, which the loop sees by itself


def _stopped_at_once() -> Failure:
    return Failure("Interrupted", "Stopped at once, by the second signal; the last checkpoint is kept.", exit_code=130)
