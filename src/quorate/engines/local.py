"""The local engine: one coordinator, one fork server and the workers that it forks, all on this machine."""

import contextlib
import functools
import logging
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from typing import Any

from quorate.checkpoint.store import CheckpointFolder
from quorate.coordinator.client import Outcome, SupervisorClient
from quorate.coordinator.event_log import EventLog
from quorate.core.errors import LinkError, QuorateError
from quorate.core.failure import CHECKPOINT_LOST, Failure, JobFailed
from quorate.core.fault import Fault
from quorate.core.networks import refuse_without_loopback
from quorate.core.timing import Timing
from quorate.engines.coordinator_keeper import CoordinatorKeeper
from quorate.engines.external_faults import ExternalFaults
from quorate.engines.fork_server_process import ForkServerLost, ForkServerProcess, Preparation, Prepared
from quorate.engines.network_namespaces import COORDINATOR, NetworkNamespaces
from quorate.engines.outcome_watch import OutcomeWatch
from quorate.engines.signals import Signals
from quorate.engines.sleepers import Sleepers
from quorate.engines.worker_processes import TICK, WorkerProcesses
from quorate.observe.event import Event
from quorate.observe.events import CheckpointSaved, GenerationFormed, LogMessage, StepCompleted
from quorate.observe.jsonl import JsonlSink
from quorate.observe.tail import EventTail
from quorate.spec.job import JobSpec
from quorate.storage.run_folder import RunFolder
from quorate.training.run_mode import RunMode
from quorate.worker.assignment import Assignment
from quorate.worker.status import read_status, status_file

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launch:
    """A job that is ready to run in its folder."""

    run: RunFolder
    spec: JobSpec
    workers: int
    job_source: str
    checkpoint: Path | None = None
    mode: RunMode = field(default_factory=RunMode)
    faults: tuple[Fault, ...] = ()
    # Where the task is loaded from, if not from where the job says.
    task: str | None = None
    search_path: list[str] = field(default_factory=lambda: [entry or str(Path.cwd()) for entry in sys.path])
    # Where its processes live, if not all in the launcher's network.
    namespaces: NetworkNamespaces | None = None


class LocalEngine:
    """Runs one job: starts its processes, passes on what happens to them, and leaves none behind."""

    def __init__(
        self,
        launch: Launch,
        show: Callable[[Event], None],
        accept: Callable[[Prepared], None],
        signals: Signals,
    ) -> None:
        self._launch = launch
        self._show = show
        self._accept = accept
        self._signals = signals
        self._timing = Timing(launch.spec.failure_timeout)
        self._token = secrets.token_urlsafe(32)
        self._tail = EventTail(launch.run.events_file)
        self._tail.read_new()  # what an earlier part of the run has told is not news
        self._events_from = self._tail.offset
        self._has_formed = False
        self._saved: int | None = None
        self._spares = launch.spec.spares if launch.mode.is_training else 0
        self._sleepers = Sleepers(launch.faults, launch.run.logs)

    def run(self) -> Outcome:
        """Run the job to its end."""
        if self._launch.namespaces is None:
            refuse_without_loopback()
        logs = self._launch.run.logs
        try:
            with contextlib.ExitStack() as stack:
                # It does so itself, unless it was killed.
                stack.callback(self._launch.run.remove_address)
                coordinator = CoordinatorKeeper(
                    logs / "coordinator.log", self._appointment(), self._token, self._timing
                )
                stack.callback(coordinator.close)
                worker_processes = WorkerProcesses(
                    self._launch.run,
                    open_fork_server=lambda: ForkServerProcess(logs / "fork_server.log", self._preparation()),
                    assign=lambda slot, checkpoint, is_replacement: self._assignment(
                        slot, coordinator.address, checkpoint, is_replacement=is_replacement
                    ),
                    tell=lambda message: self._show(LogMessage(level="info", message=message)),
                    setup_timeout=self._launch.spec.setup_timeout,
                    has_formed=lambda: self._has_formed,
                )
                stack.callback(worker_processes.close)
                # Asked first, while torch is being imported: a port in use is told at once.
                return self._attend(coordinator, worker_processes, coordinator.open())
        finally:
            self._show_events()

    def _attend(
        self, coordinator: CoordinatorKeeper, worker_processes: WorkerProcesses, client: SupervisorClient
    ) -> Outcome:
        """Supervise, and see to it that the run's events tell what ended it, also when no worker can."""
        try:
            prepared = worker_processes.await_ready(give_up=lambda: self._signals.reason is not None)
            if prepared is None:
                client.stop(self._signals.reason or "interrupted")
                return Outcome(None, {"ending": self._signals.reason})
            self._accept(prepared)
            patience = self._timing.failure_timeout / 4
            with contextlib.closing(OutcomeWatch(client, patience, worker_processes.seen_to)) as watch:
                return self._supervise(coordinator, worker_processes, client, watch)
        except QuorateError as error:
            self._write_down(Failure.of(error), coordinator, client)
            raise

    def _write_down(self, failure: Failure, coordinator: CoordinatorKeeper, client: SupervisorClient) -> None:
        with contextlib.suppress(LinkError):
            if coordinator.is_alive:
                client.report_failure(failure)
                return
        # The run's events are the coordinator's to write, unless it cannot any more.
        with contextlib.closing(EventLog(JsonlSink(self._launch.run.events_file))) as event_log:
            event_log.job_failed(failure)

    def _supervise(
        self,
        coordinator: CoordinatorKeeper,
        worker_processes: WorkerProcesses,
        client: SupervisorClient,
        watch: OutcomeWatch,
    ) -> Outcome:
        for slot in range(self._launch.workers + self._spares):
            worker_processes.start(slot, self._launch.checkpoint)
        asked = False
        faults = ExternalFaults(
            self._launch.faults,
            self._launch.run.logs,
            coordinator,
            client,
            workers=lambda: watch.workers or self._launch.workers,
            namespaces=self._launch.namespaces,
        )
        while watch.outcome is None:
            # First of all: whoever reports to a coordinator that is gone waits for nothing.
            if self._keep(coordinator, worker_processes, watch):
                asked = False  # the next one has not heard of it
            self._look_after(worker_processes, client, watch)
            faults.bring_about(time.monotonic())
            if self._show_events():
                coordinator.note_step()
                worker_processes.note_step()
            if self._is_ordered_to_end():
                raise JobFailed(_stopped_at_once(self._signals, self._launch.mode))
            if self._signals.reason and not asked:
                asked = self._ask_to_stop(client)
                if not self._has_formed:  # nothing is trained yet that would have to be saved
                    return Outcome(None, {"ending": self._signals.reason})
        self._let_leave(worker_processes, watch.outcome)
        return watch.outcome

    def _look_after(self, worker_processes: WorkerProcesses, client: SupervisorClient, watch: OutcomeWatch) -> None:
        try:
            worker_processes.look(TICK)
        except ForkServerLost as error:
            raise JobFailed(self._lost(error.message)) from None
        worker_processes.report(client)
        with contextlib.suppress(Empty):
            while True:
                worker_processes.heed(watch.news.get_nowait())
        self._sleepers.wake_those_due(worker_processes.running, time.monotonic())
        worker_processes.refill(functools.cache(self._newest))  # to find it takes reading it through

    def _keep(self, coordinator: CoordinatorKeeper, worker_processes: WorkerProcesses, watch: OutcomeWatch) -> bool:
        """See to it that there is a coordinator that answers; whether it is another one now."""
        coordinator.kill_if_silent(watch.answered)
        if coordinator.is_alive or watch.outcome is not None:
            return False
        roster = worker_processes.roster() | {"events_from": self._events_from, "has_begun": self._has_formed}
        workers = watch.workers or self._launch.workers
        if not coordinator.replace({"workers": workers, "roster": roster}):
            raise JobFailed(self._lost(coordinator.last_words))
        return True

    def _ask_to_stop(self, client: SupervisorClient) -> bool:
        with contextlib.suppress(LinkError):  # asked again in the next round, of the next coordinator perhaps
            client.stop(self._signals.reason or "interrupted")
            return True
        return False

    def _is_ordered_to_end(self) -> bool:
        """Whether to wait for nothing: by the second signal, or by the first where there is nothing to save."""
        asked = self._signals.reason is not None
        return self._signals.at_once or (asked and not self._launch.mode.is_training)

    def _lost(self, what: str) -> Failure:
        """Why a job ends that has lost, again and again, a process which is no worker."""
        pages = [read_status(status_file(self._launch.run, slot)) for slot in range(self._launch.workers)]
        step = max((page.step for page in pages if page is not None), default=0) or None
        where = f" at step {step}" if step else " before the first step"
        message = f"{what}{where}, as those before it; the job is given up. Its log is in {self._launch.run.logs}."
        return Failure("ProcessLost", message, step=step)

    def _newest(self) -> Path | None:
        folder = CheckpointFolder.of_job(self._launch.run.checkpoints, self._launch.spec.checkpoint)
        return find_newest(folder, self._launch.checkpoint, self._saved)

    def _let_leave(self, worker_processes: WorkerProcesses, outcome: Outcome) -> None:
        """They have been told of the end; whoever does not leave in time is killed with the fork server."""
        is_complete = outcome.failure is None and outcome.result.get("steps")
        patience = self._timing.failure_timeout if is_complete else min(self._timing.failure_timeout, 1.0)
        with contextlib.suppress(ForkServerLost):  # one that dies now takes with it only who is to leave
            worker_processes.let_leave(patience, lambda: self._signals.at_once)

    def _show_events(self) -> bool:
        """Show what is new; whether a step is among it."""
        events = self._tail.read_new()
        for event in events:
            self._has_formed = self._has_formed or isinstance(event, GenerationFormed)
            self._saved = event.step if isinstance(event, CheckpointSaved) else self._saved
            self._show(event)
        return any(isinstance(event, StepCompleted) for event in events)

    def _appointment(self) -> dict[str, Any]:
        spec = self._launch.spec
        return {
            "run": str(self._launch.run.path),
            "lanes": spec.lanes,
            "workers": self._launch.workers,
            "spares": self._spares,
            # A run beside it may have fewer workers than the job.
            "min_workers": min(spec.min_workers, self._launch.workers),
            "failure_timeout": spec.failure_timeout,
            "step_timeout": spec.step_timeout,
            "balance": spec.balance,
            "token": self._token,
            "port": spec.port,
            "log_level": spec.log_level,
            **self._home(COORDINATOR),
        }

    def _preparation(self) -> Preparation:
        spec = self._launch.spec
        return Preparation(
            task=self._launch.task or spec.task,
            params=spec.params,
            job_source=self._launch.job_source,
            search_path=self._launch.search_path,
            seed=spec.seed,
            threads=spec.threads,
            deterministic=spec.deterministic,
        )

    def _assignment(self, slot: int, address: str, checkpoint: Path | None, *, is_replacement: bool) -> Assignment:
        launch = self._launch
        return Assignment(
            run=str(launch.run.path),
            slot=slot,
            workers=launch.workers,
            task=launch.task or launch.spec.task,
            job=launch.spec.model_dump(mode="json"),
            job_source=launch.job_source,
            coordinator=address,
            token=self._token,
            checkpoint=None if checkpoint is None else str(checkpoint),
            is_replacement=is_replacement,
            mode=launch.mode,
            faults=launch.faults,
            **self._home(slot),
        )

    def _home(self, place: int) -> dict[str, str]:
        namespaces = self._launch.namespaces
        return {} if namespaces is None else {"network": namespaces[place].network, "host": namespaces[place].address}


def find_newest(checkpoints: CheckpointFolder, begin: Path | None, saved: int | None) -> Path | None:
    """The newest whole checkpoint; None if there has never been one, so that a job has to begin again.

    `begin` is what the job began from, and `saved` the step that it has saved last. Where there was a checkpoint and
    none is whole any more, the job fails: to begin again would throw away in silence what was trained.
    """
    folder, search = checkpoints.folder, checkpoints.search()
    if search.newest is not None:
        return search.newest.path
    if begin is not None and begin.parent != folder and begin.is_dir():
        return begin  # of another run, from which this one has branched off
    if begin is None and saved is None and not search.skipped:
        return None
    missed = f"the checkpoint of step {saved}" if saved is not None else "what the job began from"
    if saved is None and begin is None:
        missed = "its newest checkpoint"
    found = "".join(f"; {one.path.name}: {one.reason.rstrip('.')}" for one in search.skipped)
    message = (
        f"every worker is lost, and {missed} cannot be read any more: there is no whole checkpoint in {folder}{found}."
        " The job ends rather than begin again with step 1."
    )
    raise JobFailed(Failure(CHECKPOINT_LOST, message, step=saved))


def _stopped_at_once(signals: Signals, mode: RunMode) -> Failure:
    message = "stopped at once, by the second signal; the checkpoints so far are kept."
    if not mode.is_training:
        message = f"{signals.reason}; the run is as it was."
    return signals.failure(message)
