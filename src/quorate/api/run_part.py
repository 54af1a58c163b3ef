"""One part of a run: from its launch to what it comes to, shown, recorded and written down."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from quorate.api.prints import RunStart, Watch, WithPrints
from quorate.api.recorded_run import remains_of, run_argument, short_path
from quorate.api.result import Result
from quorate.api.tasks import TaskLocation
from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.selection import search_own, why_foreign
from quorate.checkpoint.store import CheckpointFolder
from quorate.coordinator.places import Outcome
from quorate.core.errors import JobError, QuorateError, RequestError
from quorate.core.failure import Failure, JobFailed
from quorate.core.installation import install_of
from quorate.core.log_records import Place, RecordHandler, also_logging
from quorate.core.machine import usable_cores
from quorate.core.masking import register_secrets
from quorate.engines.engine import Engine, Prepared
from quorate.engines.local import LocalEngine
from quorate.history.event_index import IndexSink
from quorate.observe.event import Event
from quorate.observe.events import LogMessage, RunFailed, RunFinished, StepCompleted
from quorate.observe.jsonl import end_of_events
from quorate.observe.notices import EARLY_STOP
from quorate.observe.recoveries import RecoveryLog
from quorate.observe.sinks import Guarded, Round, Sink
from quorate.observe.waiting import DataWaitLog
from quorate.spec.device import idle_gpus, workers_here
from quorate.spec.job import JobSpec, TaskReference, job_secrets
from quorate.spec.override import ENVIRONMENT
from quorate.spec.resolved import ResolvedJob
from quorate.spec.rules import doubtful_modes
from quorate.spec.tracking import TrackSpec
from quorate.storage.log_file import LogFile
from quorate.storage.run_folder import RunFolder
from quorate.supervisor.signals import Signals
from quorate.supervisor.supervisor import Launch, Supervisor
from quorate.task.run_mode import PAUSED, RunMode

log = logging.getLogger(__name__)

STATUSES = {EARLY_STOP: "complete", PAUSED: "interrupted"}
"""The status of a run by how its part has ended, where that is not the same word."""

Show = Callable[[Event], None]
Accept = Callable[[Prepared], None]
Runner = Callable[[Launch, Show, Accept, Signals], Outcome]
"""Runs a job to its end: shows its events, and has the machine and the task accepted first."""


def run_locally(launch: Launch, show: Show, accept: Accept, signals: Signals, **given: Any) -> Outcome:
    """Run a job on this machine: a `Runner`. What is `given` is for its engine."""
    return Supervisor(LocalEngine(launch.run, launch.preparation, **given), launch, show, accept, signals).run()


def run_on_engine(launch: Launch, show: Show, accept: Accept, signals: Signals, **given: Any) -> Outcome:
    """Run a job where it says: a `Runner`. What is `given` is for an engine of that kind."""
    spec = launch.spec
    if not spec.engine.opened_by:
        return run_locally(launch, show, accept, signals)
    refuse_missing_engine(spec)
    if spec.engine.object_store is not None:
        from quorate.stores.stored_run import keep_in_store

        keep_in_store(launch.run, spec, spec.engine.object_store)
    places = launch.first_workers + (spec.spares + spec.strategy.server_count if launch.mode.is_training else 0)

    def stopped() -> Failure | None:
        told = f"{signals.reason} while it connected to the cluster; nothing has begun."
        return None if signals.reason is None else signals.failure(told)

    open_engine = resolve_name(spec.engine.opened_by)
    engine: Engine = open_engine(launch.run, launch.preparation, spec, places, stopped, **given)
    with contextlib.closing(engine):
        return Supervisor(engine, launch, show, accept, signals).run()


def refuse_missing_engine(spec: JobSpec) -> None:
    """Before a run has its folder: what a job is to run on must be installed."""
    spec.engine.refuse_missing()
    if spec.engine.object_store is not None:
        from quorate.stores.stored_run import refuse_unusable_store

        refuse_unusable_store(spec, spec.engine.object_store)


def refuse_cluster(spec: JobSpec, what: str) -> None:
    """For what happens on this machine alone."""
    if spec.engine.is_cluster:
        raise RequestError(
            f"{what} on this machine, and the job says engine: {spec.engine.kind}. Its bits are the same here: "
            "--set engine=local"
        )


@dataclass(frozen=True)
class Setup:
    """How a run is trained here: by its task at a place, shown to whom, run by what, and up to which step."""

    place: TaskLocation
    watch: Watch
    runner: Runner
    until: int | None = None
    notices: tuple[str, ...] = ()


@dataclass
class Part:
    """One part of a run, from its launch to what it comes to: a run that is resumed has several.

    It knows whether a step of this part was done, what it has recovered from, and whether its end was told. `accept`
    refuses a machine or a task that does not fit the run.
    """

    run: RunFolder
    resolved: ResolvedJob
    setup: Setup
    accept: Accept
    checkpoint: CheckpointInfo | None

    def __post_init__(self) -> None:
        self._spec = self.resolved.spec
        register_secrets(job_secrets(self._spec))
        self._workers = workers_here(self._spec, usable_cores())
        # First: what is switched on may be refused, and a display would be left open.
        self._signals = Signals()
        self._observers: list[Guarded] = []
        self._notices = list(self.setup.notices)
        try:
            is_hurried = lambda: bool(self._signals.received)  # noqa: E731
            for sink in observers(self.run, self._spec, self._notices.append, self._say, is_hurried):
                self._observers.append(Guarded(sink))
        except BaseException:
            self._close_observers()  # those that came before the one that cannot be
            raise
        begun = RunStart(self.run, self._spec, self._workers)
        self._display = Guarded(WithPrints(self.setup.watch(begun), self.run))
        self.has_trained = self._has_finished = self._has_ended = False
        self._recoveries = RecoveryLog()
        self._waiting = DataWaitLog()

    def train(self, signals: Signals) -> Result:
        """Launch its processes, show it, write down what it comes to, and wait for copies of its checkpoints."""
        place = Place("launcher", self.run.name)
        if self._spec.share is not None:
            self.run.open_to_group()
        self.run.logs.mkdir(exist_ok=True)  # logs may be removed to save space, and the run resumed after that
        log_file = LogFile(self.run.logs / "launcher.jsonl", {"process": place.process})
        logged = also_logging(RecordHandler(place, log_file.append), self._spec.log_level)
        with contextlib.closing(log_file), logged, self._mirrored(), self.run.reserving():
            return self._train(signals)

    def _mirrored(self) -> contextlib.AbstractContextManager[None]:
        if self._spec.engine.object_store is None and self.run.stored is None:
            return contextlib.nullcontext()
        from quorate.stores.stored_run import mirrored

        return mirrored(self.run, self._spec)

    def _train(self, signals: Signals) -> Result:
        self._signals = signals
        copied: list[dict[str, Any]] = []
        started = time.perf_counter()
        for notice in self._notices:
            self._say(notice)
        if (idle := idle_gpus(self._spec, self._workers)) is not None:
            log.warning("%s", idle)
            self._display.handle(LogMessage(level="warning", message=idle))
        for doubt in doubtful_modes(self._spec):
            self._display.handle(LogMessage(level="warning", message=doubt))
        try:
            # Before there are copiers, which write events themselves: those are news.
            events_from = end_of_events(self.run.events_file)
            copies = None
            if self._spec.checkpoint.to[1:]:
                from quorate.api.copies import Copies

                copies = Copies(self.run, self._spec, self._handle)
            try:
                show = self._handle if copies is None else copies.handle
                outcome = self._launch(events_from, show, signals)
                fields = self._conclude(outcome, time.perf_counter() - started)
                self._tell_end(RunFinished(weights_digest=str(fields.get("weights_digest", "")), result=fields))
            except QuorateError as error:
                self._tell_end(RunFailed.of(Failure.of(error)))
                raise
            finally:
                if copies is not None:
                    copied = copies.conclude(signals) if self.has_trained else copies.abandon()
        finally:
            try:
                self._close_observers()
            finally:
                self._display.close()
        if copied:
            fields["copies"] = copied
            self._write_result(fields)
        return Result.of(self.run, fields)

    def _say(self, message: str) -> None:
        self._display.handle(LogMessage(level="info", message=message))

    def _handle(self, event: Event) -> None:
        """Show an event. Not a failure: what ended the job is told once, by the error that is raised for it."""
        if isinstance(event, Round):
            self._display.handle(event)
            return
        self.has_trained = self.has_trained or isinstance(event, StepCompleted)
        self._has_finished = self._has_finished or isinstance(event, RunFinished)
        self._has_ended = self._has_ended or isinstance(event, RunFinished | RunFailed)
        self._recoveries.handle(event)
        self._waiting.handle(event)
        if not isinstance(event, RunFailed):
            self._display.handle(event)
        self._observe(event)

    def _observe(self, event: Event) -> None:
        for sink in self._observers:
            sink.handle(event)

    def _close_observers(self) -> None:
        # The newest first: Prometheus, which may take its time, was the first but one.
        for sink in reversed(self._observers):
            sink.close()

    def _tell_end(self, event: RunFinished | RunFailed) -> None:
        """Have observers hear of an end that no event of the run tells: before the first step, or on a full disk."""
        if not self._has_ended:
            self._observe(event)

    def _launch(self, events_from: int, show: Show, signals: Signals) -> Outcome:
        """Raises a refusal that comes before the first step; the rest is an outcome."""
        place = self.setup.place
        log.info("%d workers, lanes %d, task %s", self._workers, self._spec.lanes, place.reference)
        launch = Launch(
            self.run,
            self._spec,
            self._workers,
            _source_of_params(self.resolved),
            None if self.checkpoint is None else self.checkpoint.path,
            RunMode(until=self.setup.until),
            task=place.reference,
            search_path=place.search_path,
            events_from=events_from,
        )
        try:
            return self.setup.runner(launch, show, self._accept, signals)
        except QuorateError as error:
            if isinstance(error, RequestError) and not self.has_trained:
                raise
            return Outcome(Failure.of(error), {})
        finally:
            self._display.handle(Round(is_last=True))

    def _accept(self, prepared: Prepared) -> None:
        self.accept(prepared)
        if prepared.callbacks:
            from quorate.api.callbacks import CallbackServer, load_callbacks

            file = TaskReference.parse(self.setup.place.reference).file
            folder = Path.cwd() if file is None else file.parent
            try:
                named = [str(TaskReference.parse(each).within(folder)) for each in prepared.callbacks]
            except ValueError as error:
                raise RequestError(f"callbacks of the task: {error}") from None
            # Those that the task names are not known before it was imported.
            served = CallbackServer(self.run, load_callbacks(named), "callbacks-task.json")
            self._observers.append(Guarded(served))

    def _conclude(self, outcome: Outcome, seconds: float) -> dict[str, Any]:
        """Write down what the run comes to, before anybody waits for copies; a failure is raised as well."""
        run, result = self.run, outcome.result
        log.info("the job ends: %s", outcome.failure.message if outcome.failure else result["ending"])
        about: dict[str, Any] = {"run": run.name, "folder": str(run.path)}
        recoveries = [recovery.to_dict() for recovery in self._recoveries.recoveries]
        if outcome.failure is not None:
            raise self._failed(outcome.failure, about, recoveries)
        fields = {
            **about,
            "status": STATUSES.get(result["ending"], result["ending"]),
            "from_step": 0 if self.checkpoint is None else self.checkpoint.cursor.step,
            **({} if "steps" in result else self._state_so_far()),
            **result,
            "wall_seconds": round(seconds, 3),
            "recoveries": recoveries,
        }
        if recoveries:
            fields["recovered"] = asdict(self._recoveries.total)
        wait = self._waiting.wait
        if wait.is_worth_telling:
            advice = self._waiting.advice(self._spec, usable_cores())
            fields["waiting_for_data"] = {"share": round(wait.share, 4), "seconds": wait.waited_s, "advice": advice}
        if self.has_trained and not self._has_finished:
            log.warning("the last events could not be written: %s ends too early", short_path(run.events_file))
        self._write_result(fields)
        return fields

    def _failed(self, failure: Failure, about: dict[str, Any], recoveries: list[dict[str, Any]]) -> QuorateError:
        """The error for a failure that stands in the run folder as well, unless it is a refusal, which changes nothing.

        Even where the request was to blame, a run that has trained tells of it and is kept.
        """
        failure = failure.masked()
        if self.has_trained and failure.exit_code == RequestError.exit_code:
            failure = failure.at(exit_code=JobError.exit_code)
        if failure.is_refusal:
            return failure.error()
        status = failure.stopped or "failed"
        try:
            self.run.write_result({**about, "status": status, "failure": failure.to_dict(), "recoveries": recoveries})
        except QuorateError as error:
            log.info("%s", error)  # trouble with writing down why the job ended must not hide why it ended
        return JobFailed(failure, remains_of(self.run, self._spec, failure))

    def _write_result(self, fields: dict[str, Any]) -> None:
        try:
            self.run.write_result(fields)
        except QuorateError as error:
            raise JobError(
                f"{error.message} The job itself is {fields['status']}, after {fields['steps']} steps, and its "
                f"checkpoint is kept. Make room, then: quorate resume {run_argument(self.run)}"
            ) from error

    def _state_so_far(self) -> dict[str, Any]:
        """What holds for a run whose workers cannot tell any more, by its newest checkpoint."""
        folder = CheckpointFolder.at(self.run.checkpoints)
        search = search_own(folder.search, lambda info: why_foreign(info, self._spec))
        info = search.newest or self.checkpoint
        return {
            "steps": 0 if info is None else info.cursor.step,
            "weights_digest": "" if info is None else info.manifest.weights_digest,
            "samples_per_second": 0.0,
            "final_metrics": {} if info is None else info.manifest.metrics,
        }


def _source_of_params(resolved: ResolvedJob) -> str:
    """Where the task's parameters were said: a person who mistyped one in a flag must not look for it in the file."""
    said = [origin for key, origin in resolved.origins.items() if key.startswith("params.")]
    over = sorted({origin for origin in said if origin.startswith(("--", ENVIRONMENT))})
    return f"{resolved.source} with {' and '.join(over)}" if over else resolved.source


_EXPORTER = "opentelemetry.exporter.otlp.proto.grpc"
"""Not the packages above it, which come with MLflow, too."""


def observers(
    run: RunFolder,
    spec: JobSpec,
    tell: Callable[[str], None],
    say: Callable[[str], None],
    is_hurried: Callable[[], bool],
) -> Iterator[Sink]:
    """Sinks beside the display, the first of them first. At its end a job may wait until Prometheus has seen it: `say`
    tells people of that, `tell` what they should know from the start, and `is_hurried` ends the wait.

    Each is imported only where it is switched on: nobody waits for a library that is not used.
    """
    yield IndexSink(run.events_file)
    # The first, since it may refuse the request: nothing else is started then.
    if spec.track is not None and spec.track.prometheus is not None:
        from quorate.tracking.prometheus import PrometheusView

        view = PrometheusView(run, spec, workers_here(spec, usable_cores()), say, is_hurried)
        tell(view.notice)
        yield view
    if spec.track is not None and spec.track.has_trackers:
        from quorate.api.tracker import TrackerProcess

        try:
            process = TrackerProcess(run, spec, say)
        except OSError as error:  # no room for its log, or no process more: that is no reason not to train
            log.warning("the run is not tracked: %s. quorate track does that later", error)
        else:
            yield process
    if spec.callbacks:
        from quorate.api.callbacks import CallbackServer, load_callbacks

        yield CallbackServer(run, load_callbacks(spec.callbacks))
    if spec.notify is not None:
        from quorate.tracking.notify import Notifier

        yield Notifier(run, spec.name, spec.notify)


def refuse_missing_libraries(track: TrackSpec | None) -> None:
    """Before anything is started: what a job is to be tracked by must be installed."""
    if track is None:
        return
    if track.trace is not None and track.trace.otlp and not _is_installed(_EXPORTER):
        raise RequestError(
            "track.trace.otlp needs the libraries of OpenTelemetry, which are not installed here: "
            f"{install_of('otlp')}. Without the key, `quorate trace` shows the traces all the same."
        )
    for key, wanted in (("mlflow", track.mlflow), ("tensorboard", track.tensorboard), ("wandb", track.wandb)):
        if wanted and not _is_installed(key):
            raise RequestError(f"track.{key} needs the library {key}, which is not installed here: {install_of(key)}")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # nor is what it belongs to
        return False
