"""Supervises one job on an engine: starts its processes, passes on what happens to them, and leaves none behind."""

import contextlib
import functools
import logging
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from queue import Empty
from typing import Any, Protocol

from quorate.checkpoint.selection import Foreign, search_own, why_foreign
from quorate.checkpoint.store import CheckpointFolder
from quorate.coordinator.client import SupervisorClient
from quorate.coordinator.event_log import EventLog
from quorate.coordinator.places import Outcome, places_of
from quorate.core.errors import LinkError, QuorateError, RequestError
from quorate.core.failure import CHECKPOINT_LOST, FOLDER_LOST, Failure, JobFailed
from quorate.core.masking import forget_secrets, known_secrets, register_secrets
from quorate.core.timing import Timing
from quorate.engines.engine import Engine, Preparation, Prepared
from quorate.observe import events
from quorate.observe.event import Event
from quorate.observe.jsonl import EventTail, JsonlSink
from quorate.observe.sinks import Round
from quorate.spec.device import kind_of
from quorate.spec.job import JobSpec
from quorate.spec.options import GrowSpec
from quorate.storage.run_folder import RunFolder
from quorate.supervisor.coordinator_process import CoordinatorProcess, EventFollower, OutcomeWatch
from quorate.supervisor.growth import Growth, numbers_of_use
from quorate.supervisor.signals import Signals
from quorate.supervisor.worker_processes import TICK, EngineLost, WorkerProcesses
from quorate.task.run_mode import RunMode
from quorate.wire.certificates import Authority
from quorate.wire.handshake import COORDINATOR, SUPERVISOR, Identity
from quorate.worker.assignment import Assignment

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
    # Where the task is loaded from, if not from where the job says.
    task: str | None = None
    search_path: list[str] = field(default_factory=lambda: [entry or str(Path.cwd()) for entry in sys.path])
    # What an earlier part of the run has told, before this place of its event log, is not news.
    events_from: int = 0
    identifies: bool = False

    @property
    def first_workers(self) -> int:
        """With how many it begins: a job that grows has measured nothing yet."""
        return self.workers if self.grow is None else min(self.spec.min_workers, self.workers)

    @property
    def grow(self) -> GrowSpec | None:
        """How it grows, if it does."""
        return self.spec.engine.grow if self.mode.is_training else None

    @property
    def preparation(self) -> Preparation:
        return Preparation(
            task=self.task or self.spec.task,
            params=self.spec.params,
            job_source=self.job_source,
            search_path=self.search_path,
            seed=self.spec.seed,
            threads=self.spec.threads,
            deterministic=self.spec.deterministic,
            device=kind_of(self.spec),
            failure_timeout=self.spec.failure_timeout,
            identify=self.spec.model_dump() if self.identifies else None,
        )


@dataclass(frozen=True)
class Controls:
    """What a hook may know of a job's processes and do to them: pids by worker, and how many workers are wanted."""

    running: Mapping[int, int]
    workers: int
    kill_coordinator: Callable[[], None]
    # To so many workers, and servers; None is as many as now.
    resize: Callable[[int | None, int | None], None]


class SupervisorHook(Protocol):
    """Whoever disturbs a job on purpose. The supervisor's loop calls it."""

    def on_start(self, assignment: Assignment) -> Assignment:
        """A worker is about to be started; with what it is to be told."""
        ...

    def on_round(self, controls: Controls, now: float) -> None:
        """Some 20 times a second while the job runs."""
        ...


class Supervisor:
    """Runs one job on an engine, which it closes at the end."""

    # From `run` on.
    _coordinator: CoordinatorProcess
    _workers: WorkerProcesses
    _client: SupervisorClient
    _watch: OutcomeWatch
    # From the moment on at which the coordinator listens.
    _follower: EventFollower | None = None

    def __init__(
        self,
        engine: Engine,
        launch: Launch,
        handle: Callable[[Event], None],
        accept: Callable[[Prepared], None],
        signals: Signals,
        hook: SupervisorHook | None = None,
    ) -> None:
        self._engine = engine
        self._launch = launch
        self._handle = handle
        self._accept = accept
        self._signals = signals
        self._hook = hook
        self._timing = Timing(launch.spec.failure_timeout)
        self._token = secrets.token_urlsafe(32)
        register_secrets([self._token])
        # Of all launches of a run, this one: whose coordinator is the newest, has the run.
        self._launch_id = secrets.token_hex(8)
        is_encrypted = engine.capacity().spans_hosts if launch.spec.encrypt == "auto" else launch.spec.encrypt
        self._authority = Authority(launch.run.name) if is_encrypted else None
        self._has_formed = False
        self._step = 0
        self._saved: int | None = None
        # What the events say of a stop, or of an end, that was asked for from elsewhere.
        self._stop_told: str | None = None
        self._failure_told: Failure | None = None
        self._landmark = launch.run.job_file if launch.run.job_file.exists() else launch.run.path
        self._missed, self._look_at = 0, 0.0
        self._growth = None
        if launch.grow is not None:
            numbers = numbers_of_use(launch.spec.lanes, launch.first_workers, launch.workers)
            self._growth = Growth(launch.grow, numbers)
        self._spares = launch.spec.spares if launch.mode.is_training else 0
        # What is evaluated or replayed comes to the same without them.
        self._servers = launch.spec.strategy.server_count if launch.mode.is_training else 0

    def run(self) -> Outcome:
        self._warn_of_crowd()
        with contextlib.closing(self._engine), contextlib.ExitStack() as stack:
            # Last of all: a program that runs many jobs would have more to look for in each line that it logs.
            stack.callback(forget_secrets, [self._token])
            # It does so itself, unless it was killed.
            stack.callback(self._remove_address)
            own = self._identity_of(SUPERVISOR)
            self._coordinator = CoordinatorProcess(self._engine, self._appointment(), self._token, self._timing, own)
            stack.callback(self._coordinator.close)
            self._workers = WorkerProcesses(
                self._engine,
                assign=self._assignment,
                notify=lambda message: self._handle(events.LogMessage(level="info", message=message)),
                setup_timeout=self._launch.spec.setup_timeout,
                has_formed=lambda: self._has_formed,
            )
            # Asked first, while torch is being imported: a port in use is told at once.
            client = self._coordinator.open(give_up=self._is_to_end)
            if client is None:
                return self._ended_early(None)
            self._client = client
            self._follower = EventFollower(client, self._launch.events_from)
            stack.callback(self._conclude, self._follower)
            return self._attend()

    def _warn_of_crowd(self) -> None:
        workers, threads, cores = self._launch.workers, self._launch.spec.threads, self._engine.capacity().cores
        needed = (workers + self._servers) * threads
        if self._launch.mode.is_training and needed > cores:
            who = f"({workers} workers + {self._servers} servers)" if self._servers else f"{workers} workers"
            log.warning(
                "%s × %d threads = %d, more than the %d cores that may be used here: they take turns, which is slower "
                "(same result; fewer `workers` may be faster)",
                who,
                threads,
                needed,
                cores,
            )

    def _conclude(self, follower: EventFollower) -> None:
        """End all workers, and pass on the last events."""
        self._engine.close()
        is_complete = follower.close(read_rest=self._coordinator.is_alive)
        self._handle_events()
        if is_complete:
            return
        # What no coordinator tells any more: what the last one wrote before it died, and why the job ended.
        for event in self._untold():
            self._handle(event)

    def _untold(self) -> Iterator[Event]:
        """What the last coordinator wrote, and did not live to tell."""
        tail = EventTail(self._launch.run.events_file)
        tail.offset = self._launch.events_from if self._follower is None else self._follower.offset
        try:
            yield from tail
        except QuorateError as error:
            log.warning("the last events could not be read: %s", error)

    def _attend(self) -> Outcome:
        """Supervise, and see to it that the run's events tell what ended it, also when no worker can."""
        try:
            prepared = self._workers.await_ready(give_up=self._is_to_end)
            if prepared is None:
                return self._ended_early(self._client)
            self._accept(prepared)
            patience = self._timing.failure_timeout / 4
            with contextlib.closing(OutcomeWatch(self._client, patience, self._workers.processes)) as self._watch:
                return self._supervise()
        except QuorateError as error:
            self._record_failure(Failure.of(error))
            raise

    def _is_to_end(self) -> bool:
        """Whether somebody wants the end of a job that has not begun: by a signal, or by its coordinator."""
        self._handle_events()
        self._handle(Round(doing=self._workers.doing))
        return self._signals.reason is not None or self._stop_told is not None or self._failure_told is not None

    def _ended_early(self, client: SupervisorClient | None) -> Outcome:
        if self._failure_told is not None:
            return Outcome(self._failure_told, {})
        reason = self._stop_told or self._signals.reason or "interrupted"
        if client is not None:
            with contextlib.suppress(LinkError):
                client.stop(reason)
        return Outcome(None, {"ending": reason})

    def _record_failure(self, failure: Failure) -> None:
        with contextlib.suppress(LinkError):
            if self._coordinator.is_alive and self._coordinator.listens:
                self._client.report_failure(failure)
                return
        if not self._coordinator.listens:
            self._coordinator.kill()  # it would begin to write there, too
        if self._is_run_elsewhere():
            return
        # The run's events are the coordinator's to write, unless it cannot any more.
        with contextlib.closing(EventLog(JsonlSink(self._launch.run.events_file))) as event_log:
            event_log.publish(events.RunFailed.of(failure))

    def _supervise(self) -> Outcome:
        coordinator, workers, watch = self._coordinator, self._workers, self._watch
        for slot in places_of(self._launch.first_workers + self._spares, self._servers):
            workers.start(slot, self._launch.checkpoint)
        asked = False
        while watch.outcome is None:
            # First of all: whoever reports to a coordinator that is gone waits for nothing.
            is_another = self._keep()
            asked = asked and not is_another  # which has not heard of it
            try:
                workers.look(TICK if coordinator.listens else 0.0)
            except EngineLost as error:
                raise JobFailed(self._lost(error.message)) from None
            if coordinator.listens:
                workers.report(self._client)
            with contextlib.suppress(Empty):
                while True:
                    workers.handle(watch.news.get_nowait())
            workers.refill(functools.cache(self._newest))  # to find it takes reading it through
            if self._hook is not None:
                wanted = watch.workers or self._launch.first_workers
                controls = Controls(workers.running, wanted, coordinator.kill, self._client.resize)
                self._hook.on_round(controls, time.monotonic())
            if self._handle_events():
                coordinator.note_step()
                workers.note_step()
                if self._growth is not None:
                    self._grow(self._growth)
            self._handle(Round(doing="" if self._has_formed else workers.doing))
            asked = self._heed_signals(asked)
            self._end_without_folder()
            # Told of the stop after every generation before it: without one nothing is trained that were to be saved.
            if self._stop_told and not self._has_formed:
                return Outcome(None, {"ending": self._stop_told})
        # They have been told of the end; whoever does not leave in time is killed with the engine.
        is_complete = watch.outcome.failure is None and watch.outcome.result.get("steps")
        patience = self._timing.failure_timeout if is_complete else min(self._timing.failure_timeout, 1.0)
        workers.let_leave(patience, lambda: self._signals.at_once)
        return watch.outcome

    def _keep(self) -> bool:
        """See to it that there is a coordinator that answers; whether it is another one now."""
        coordinator, watch = self._coordinator, self._watch
        if coordinator.look(watch.answered) or watch.outcome is not None:
            return False
        if self._is_run_elsewhere():
            message = (
                f"run {self._launch.run.name} continues elsewhere: a coordinator that was not started here has taken "
                "it over, and this one has ended. Nothing is lost; look there."
            )
            raise JobFailed(Failure("RunTakenOver", message, step=self._step or None))
        roster = self._workers.roster() | {"events_from": self._launch.events_from, "has_begun": self._has_formed}
        if not coordinator.replace({"workers": watch.workers or self._launch.first_workers, "roster": roster}):
            raise JobFailed(self._lost(coordinator.departure))
        return True

    def _heed_signals(self, asked: bool) -> bool:
        """Pass on that the job is to stop, if it is and this was not `asked`; otherwise asked again in the next round,
        of the next coordinator perhaps. Nothing is waited for any more after the second signal, or after the first
        where there is nothing to save."""
        if self._signals.reason is not None and not self._launch.mode.is_training:
            raise JobFailed(self._signals.failure(f"{self._signals.reason}; the run is as it was."))
        if self._signals.at_once:
            message = "stopped at once, by the second signal; any checkpoint so far is kept."
            raise JobFailed(self._signals.failure(message))
        stop = self._stop_told or self._signals.reason
        if stop and not asked and self._coordinator.listens:
            with contextlib.suppress(LinkError):
                self._client.stop(stop)
                return True
        return asked

    def _remove_address(self) -> None:
        if not self._is_run_elsewhere():
            self._launch.run.remove_address()

    def _is_run_elsewhere(self) -> bool:
        """To start another coordinator then would take the run back, and so on without end."""
        return self._launch.run.incarnations.is_taken_by_other(self._launch_id)

    def _grow(self, growth: Growth) -> None:
        """Ask for another number of workers, where that is worth it; tell once that it stays as it is."""
        if (verdict := growth.verdict()) is None:
            return
        if growth.is_last(verdict):
            growth.is_over = True
            self._handle(events.LogMessage(level="info", message=verdict.reason))
            return
        try:
            self._client.resize(verdict.workers, reason=verdict.reason)
        except LinkError as error:  # asked again after the next step, of the next coordinator perhaps
            log.info("%s; this could not be asked for: %s", verdict.reason, error)
        except RequestError as error:  # the job is stopping, say
            log.info("%s; this cannot be: %s", verdict.reason, error)
            growth.is_over = True
        else:
            growth.note_asked(verdict)

    def _end_without_folder(self) -> None:
        """Train no further where nothing can be saved: the run was renamed or removed."""
        if (now := time.monotonic()) < self._look_at:
            return
        self._look_at = now + 1.0
        try:
            self._landmark.stat()
            self._missed = 0
        except FileNotFoundError:
            self._missed += 1  # a network file system may miss it once
        except OSError as error:
            log.info("%s: %s", self._landmark, error.strerror)
        if self._missed > 1:
            folder = self._launch.run.path
            message = f"the folder {folder} was renamed or removed while the run was in it, so the job ends."
            raise JobFailed(Failure(FOLDER_LOST, message, step=self._step or None))

    def _lost(self, what: str) -> Failure:
        """Why a job ends that has lost, again and again, a process which is no worker."""
        self._handle_events()
        for event in self._untold():  # coordinators that die fast tell nobody of what they have written
            self._step = event.step or self._step if isinstance(event, events.StepCompleted) else self._step
        where = f" at step {self._step}" if self._step else " before the first step"
        message = f"{what}{where}, as those before it; the job is stopped. Its log is in {self._launch.run.logs}."
        return Failure("ProcessLost", message, step=self._step or None)

    def _newest(self) -> Path | None:
        folder = CheckpointFolder.of_job(self._launch.run.checkpoints, self._launch.spec.checkpoint)
        foreign = functools.partial(why_foreign, spec=self._launch.spec)
        return find_newest(folder, self._launch.checkpoint, self._saved, foreign)

    def _handle_events(self) -> bool:
        """Pass on what is new; whether a step is among it."""
        has_stepped = False
        for event in () if self._follower is None else self._follower.new():
            self._has_formed = self._has_formed or isinstance(event, events.GenerationFormed)
            self._saved = event.step if isinstance(event, events.CheckpointSaved) else self._saved
            self._stop_told = event.reason if isinstance(event, events.RunStopped) else self._stop_told
            self._failure_told = event.failure if isinstance(event, events.RunFailed) else self._failure_told
            if self._growth is not None:
                self._growth.handle(event)
            if isinstance(event, events.StepCompleted):
                self._step, has_stepped = event.step or 0, True
            self._handle(event)
        return has_stepped

    def _identity_of(self, process: int | str) -> Identity | None:
        return None if self._authority is None else self._authority.issue(process)

    def _appointment(self) -> dict[str, Any]:
        spec = self._launch.spec
        identity = self._identity_of(COORDINATOR)
        # Who only evaluates has the whole model, and lanes of their own.
        mesh = spec.strategy.mesh(self._launch.workers) if self._launch.mode.is_training else None
        return {
            "run": str(self._launch.run.path),
            "lanes": spec.lanes,
            "workers": self._launch.first_workers,
            "spares": self._spares,
            "servers": self._servers,
            # A run beside it may have fewer workers than the job.
            "min_workers": min(spec.min_workers, self._launch.workers),
            "failure_timeout": spec.failure_timeout,
            "step_timeout": spec.step_timeout,
            "balance": spec.balance,
            "mesh": None if mesh is None else astuple(mesh),
            "is_fixed": spec.strategy.couples_passes,
            "token": self._token,
            "launch": self._launch_id,
            "port": spec.port,
            "log_level": spec.log_level,
            "secrets": known_secrets(),
            "identity": None if identity is None else asdict(identity),
        }

    def _assignment(self, slot: int, checkpoint: Path | None, is_replacement: bool) -> Assignment:
        launch = self._launch
        assignment = Assignment(
            run=str(launch.run.path),
            slot=slot,
            workers=launch.workers,
            task=launch.task or launch.spec.task,
            job=launch.spec.model_dump(mode="json"),
            job_source=launch.job_source,
            coordinator=self._coordinator.address,
            token=self._token,
            checkpoint=None if checkpoint is None else str(checkpoint),
            is_replacement=is_replacement,
            mode=launch.mode,
            identity=self._identity_of(slot),
        )
        return assignment if self._hook is None else self._hook.on_start(assignment)


def find_newest(
    checkpoints: CheckpointFolder, begin: Path | None, saved: int | None, foreign: Foreign = lambda _: ""
) -> Path | None:
    """The newest whole checkpoint of the job; None if there has never been one, so that a job has to begin again.

    `begin` is what the job began from, and `saved` the step that it has saved last. Where there was a checkpoint and
    none is whole any more, the job fails: to begin again would throw away in silence what was trained.
    """
    folder, search = checkpoints.folder, search_own(checkpoints.search, foreign)
    if search.newest is not None:
        return search.newest.path
    if begin is not None and begin.parent != folder and begin.is_dir():
        return begin  # of another run, from which this one has branched off
    if not search.skipped and begin is None and (saved is None or checkpoints.distrusted()):
        return None
    missed = f"the checkpoint of step {saved}" if saved is not None else "what the job began from"
    if saved is None and begin is None:
        missed = "its newest checkpoint"
    found = "".join(f"; {one.path.name}: {one.reason.rstrip('.')}" for one in search.skipped)
    message = (
        f"every worker is lost, and {missed} can no longer be read: there is no valid checkpoint in {folder}{found}."
        " The job ends rather than begin again with step 1."
    )
    raise JobFailed(Failure(CHECKPOINT_LOST, message, step=saved))
