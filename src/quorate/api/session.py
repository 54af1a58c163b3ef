"""From a job to its result: a new run, or one that is resumed.

`start` and `resume` decide in which folder and from which checkpoint; a `_Part` of the run does the rest for both.
"""

import contextlib
import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from quorate.api.batch_size import with_batch_found
from quorate.api.copies import Copies
from quorate.api.engines import engine_of, refuse_missing_engine
from quorate.api.fetch import fetch_run, is_copy
from quorate.api.job import job_text
from quorate.api.lineage import has_trained_parts, is_on_the_way, train_lineage
from quorate.api.observers import Observers, refuse_missing_libraries
from quorate.api.recorded_run import (
    newest_checkpoint,
    recorded_and_asked,
    recorded_environment,
    recorded_job,
    refuse_complete,
    refuse_early_stopped,
    refuse_edited_job,
    refuse_other_meaning,
    remains_of,
    restore_environment,
    run_argument,
    set_foreign_aside,
    short_path,
    warn_of_damaged_result,
    warn_of_stretched_schedule,
)
from quorate.api.result import Result
from quorate.api.tasks import TaskLocation, find_task, keep_task, refuse_other_code, with_task_at
from quorate.checkpoint.key import read_key
from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.selection import search_own, why_foreign
from quorate.checkpoint.store import CheckpointFolder
from quorate.coordinator.news import Outcome
from quorate.core.errors import CheckpointError, JobError, QuorateError, RequestError, RunError
from quorate.core.failure import Failure, JobFailed
from quorate.core.log_records import Place, RecordHandler, also_logging
from quorate.core.machine import usable_cores
from quorate.core.masking import mask_all, register_secrets, secrets_in
from quorate.engines.engine import SOURCE, Prepared
from quorate.engines.local import LocalEngine
from quorate.engines.node_code import NodeCode
from quorate.observe.event import Event
from quorate.observe.events import LogMessage, RunFailed, RunFinished, StepCompleted
from quorate.observe.jsonl import end_of_events
from quorate.observe.notices import EARLY_STOP
from quorate.observe.recoveries import RecoveryLog
from quorate.observe.sinks import Guarded, Sink
from quorate.observe.waiting import DataWaitLog
from quorate.spec.device import idle_gpus, workers_here
from quorate.spec.engine import LocalSpec, RaySpec
from quorate.spec.job import AUTO_BATCH, JobSpec
from quorate.spec.lineage import with_branch
from quorate.spec.override import ENVIRONMENT, Override
from quorate.spec.resolved import ResolvedJob, dump_job
from quorate.spec.secrets import job_secrets
from quorate.storage.log_file import LogFile
from quorate.storage.run_folder import RunFolder
from quorate.storage.submission import forget_asked, forget_submission
from quorate.supervisor.signals import Signals, listening_to_signals
from quorate.supervisor.supervisor import Launch, Supervisor
from quorate.training.run_mode import PAUSED, RunMode
from quorate.wire.certificates import refuse_without_library

log = logging.getLogger(__name__)

ENDINGS = {
    "complete": "complete",
    EARLY_STOP: "complete",
    PAUSED: "interrupted",
    "interrupted": "interrupted",
    "terminated": "terminated",
}
STOPPED = {130: "interrupted", 143: "terminated"}


@dataclass(frozen=True)
class RunStart:
    """What is known when a run begins, for whoever shows it."""

    run: RunFolder
    spec: JobSpec
    workers: int


class NoDisplay:
    """Shows nothing."""

    def handle(self, event: Event) -> None: ...

    def close(self) -> None: ...


Watch = Callable[[RunStart], Sink]
"""Called once when a run begins; what it returns is told every event, and then that there are no more."""


Runner = Callable[[Launch, Callable[[Event], None], Callable[[Prepared], None], Signals], Outcome]
"""Runs a job to its end: shows its events, and has the machine and the task accepted first."""


def run_locally(
    launch: Launch, show: Callable[[Event], None], accept: Callable[[Prepared], None], signals: Signals
) -> Outcome:
    """Run a job on this machine."""
    return Supervisor(LocalEngine(launch.run, launch.preparation), launch, show, accept, signals).run()


def run_on_engine(
    launch: Launch,
    show: Callable[[Event], None],
    accept: Callable[[Prepared], None],
    signals: Signals,
    code: NodeCode | None = None,
) -> Outcome:
    """Run a job where it says; `code` is what nodes are given, if not what follows from the job."""
    with contextlib.closing(engine_of(launch, code)) as engine:
        return Supervisor(engine, launch, show, accept, signals).run()


def start(resolved: ResolvedJob, watch: Watch, runner: Runner = run_on_engine, *, until: int | None = None) -> Result:
    """Train a job in a new run folder.

    `until`: only up to this step, of which there is a checkpoint then; the run is interrupted there ("paused"), and a
    resume trains the rest, to the bits of one that was not. Where the job is no longer than that it is complete.
    """
    refuse_in_worker()
    _refuse_until(until, 0)
    place = TaskLocation(resolved.spec.task)
    if resolved.spec.batch_size == AUTO_BATCH:
        with listening_to_signals() as signals:
            resolved, notice = with_batch_found(resolved, place, partial(run_locally, signals=signals), signals)
        return _train_in_new_run(resolved, Path(resolved.spec.runs), watch, runner, None, place, until, (notice,))
    return _train_in_new_run(resolved, Path(resolved.spec.runs), watch, runner, None, place, until)


def resume(
    runs: Path,
    reference: str,
    environment: Mapping[str, str],
    overrides: Sequence[Override],
    *,
    watch: Watch,
    branch: bool = False,
    trust_source: bool = False,
    runner: Runner = run_on_engine,
    until: int | None = None,
) -> Result:
    """Resume from a run's newest whole checkpoint; as a branch, in a new run folder with changed meaning. `until` is
    that of `start`.

    Where the reference is a copy of a run at another place, that is fetched first; `trust_source` says that the task's
    source there may be run.
    """
    refuse_in_worker()
    untrusted = ""
    if is_copy(reference):
        fetched = fetch_run(runs, reference, environment, overrides, trust_source=trust_source)
        reference, untrusted = str(fetched.path), fetched.untrusted
    run = RunFolder(RunFolder.find(runs, reference).path.absolute())
    recorded, resolved = recorded_and_asked(run, environment, overrides)
    warn_of_damaged_result(run)
    refuse_early_stopped(run, recorded.spec, resolved.spec, branch)
    if branch:
        moved = resolved.spec.runs != recorded.spec.runs
        folder = Path(resolved.spec.runs) if moved else run.path.parent
        place = find_task(run, recorded.spec.task, resolved.spec.task, untrusted)
        checkpoint = newest_checkpoint(run, recorded.spec, resolved.spec.checkpoint)
        _refuse_until(until, checkpoint.cursor.step)
        resolved = with_branch(recorded.spec, with_task_at(resolved, place), checkpoint.cursor.step)
        return _train_in_new_run(resolved, folder, watch, runner, checkpoint, place, until)
    refuse_other_meaning(run, recorded, resolved)
    with run.lock():
        _refuse_request(run, recorded, resolved)
        place = find_task(run, recorded.spec.task, resolved.spec.task, untrusted)
        resolved = with_task_at(resolved, place)
        if is_on_the_way(run, recorded.spec):
            run.write_job(job_text(resolved), is_private=is_private(resolved.spec))
            with listening_to_signals() as signals:
                return _Beginning(run, resolved, resolved.spec.task, runner, place, watch, until).train(signals)
        checkpoint = _checkpoint_for(run, recorded, resolved)
        _refuse_until(until, checkpoint.cursor.step)

        def adopt(now: Prepared) -> None:
            _adopt(run, resolved, checkpoint, place, now)
            forget_submission(run)

        # Not earlier: to read a checkpoint through may take long, and there is no job yet that a signal could stop.
        with listening_to_signals() as signals, _restored_if_refused(run):
            return _Part(run, resolved, adopt, checkpoint, runner, place, watch, until).train(signals)


def resumable(run: RunFolder, recorded: ResolvedJob, resolved: ResolvedJob) -> CheckpointInfo:
    """The checkpoint that a run goes on from, as it is asked to; refuses what it cannot be asked for."""
    refuse_other_meaning(run, recorded, resolved)
    _refuse_request(run, recorded, resolved)
    return _checkpoint_for(run, recorded, resolved)


def _refuse_request(run: RunFolder, recorded: ResolvedJob, resolved: ResolvedJob) -> None:
    refuse_complete(run, recorded.spec, resolved.spec)
    warn_of_stretched_schedule(recorded.spec, resolved.spec)
    _refuse_what_is_missing(resolved.spec)


def _checkpoint_for(run: RunFolder, recorded: ResolvedJob, resolved: ResolvedJob) -> CheckpointInfo:
    checkpoint = newest_checkpoint(run, recorded.spec, resolved.spec.checkpoint)
    refuse_edited_job(run, checkpoint, resolved)
    return checkpoint


def resume_in(
    run: RunFolder, asked: ResolvedJob, here: ResolvedJob, place: TaskLocation, watch: Watch, runner: Runner
) -> Result:
    """Resume a run whose resume was submitted elsewhere: the job `asked` for, which runs as `here` says. A refusal
    leaves all as it was, what was asked for included: whoever waits for the run is told by Ray why it has ended."""
    with run.lock():
        checkpoint = resumable(run, recorded_job(run), asked)

        def adopt(now: Prepared) -> None:
            _adopt(run, asked, checkpoint, place, now)
            forget_asked(run)

        with listening_to_signals() as signals, _restored_if_refused(run):
            try:
                result = _Part(run, here, adopt, checkpoint, runner, place, watch).train(signals)
            except JobError:
                forget_asked(run)
                raise
            forget_asked(run)
            return result


def start_in(
    run: RunFolder,
    resolved: ResolvedJob,
    place: TaskLocation,
    watch: Watch,
    runner: Runner,
    checkpoint: CheckpointInfo | None = None,
    until: int | None = None,
) -> Result:
    """Train a job in a folder that was made for it elsewhere; from a `checkpoint`, as a branch of that one's run. A
    refusal is written there: nobody may see it here."""
    with listening_to_signals() as signals, run.lock():
        try:
            _refuse_what_is_missing(resolved.spec)
            # The task as whoever resumes it elsewhere finds it: the copy that is here goes with the cluster.
            beginning = _Beginning(run, resolved, resolved.spec.task, runner, place, watch, until)
            return beginning.train(signals, checkpoint)
        except RequestError as error:
            about = {"run": run.name, "folder": str(run.path), "recoveries": []}
            run.write_result({**about, "status": "failed", "failure": Failure.of(error).masked().to_dict()})
            raise


def refuse_in_worker() -> None:
    """A script that trains as soon as it is imported would start a job inside its own job."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name in ("quorate.engines.fork_server", "quorate.worker.__main__"):
        raise RequestError(
            "The task's file starts a job when it is imported, and workers import it. "
            'Put the call of quorate.train under `if __name__ == "__main__":`.'
        )


def _train_in_new_run(
    resolved: ResolvedJob,
    folder: Path,
    watch: Watch,
    runner: Runner,
    checkpoint: CheckpointInfo | None,
    place: TaskLocation,
    until: int | None,
    notices: tuple[str, ...] = (),
) -> Result:
    if resolved.spec.batch_size == AUTO_BATCH:
        raise RequestError("batch_size: auto is for a new run. Give a branch a number; its run has found one.")
    text = job_text(resolved)
    _refuse_what_is_missing(resolved.spec)
    with listening_to_signals() as signals:
        # In a storage that others have, too, its name is not that of another run.
        engine = resolved.spec.engine
        storage = Path(engine.storage) if isinstance(engine, RaySpec) and engine.storage else None
        run = RunFolder.create(folder.absolute(), resolved.spec.name, beside=storage)
        with run.lock():
            try:
                run.write_job(text, is_private=is_private(resolved.spec))
                beginning = _Beginning(run, resolved, resolved.spec.task, runner, place, watch, until, notices)
                return beginning.train(signals, checkpoint)
            except RequestError:
                # A mistake leaves no run behind, unless it showed so late that there is something to lose.
                if not CheckpointFolder(run.checkpoints).list() and not has_trained_parts(run):
                    shutil.rmtree(run.path, ignore_errors=True)
                raise


@dataclass(frozen=True)
class _Beginning:
    """The first part of a run, after those of its lineage: what its job was before is trained first."""

    run: RunFolder
    resolved: ResolvedJob
    task: str
    runner: Runner
    place: TaskLocation
    watch: Watch
    until: int | None = None
    notices: tuple[str, ...] = ()

    def train(self, signals: Signals, checkpoint: CheckpointInfo | None = None) -> Result:
        """A branch, which begins from a checkpoint, has its lineage behind it."""
        if self.resolved.spec.lineage and checkpoint is None:
            _refuse_until(self.until, self.resolved.spec.lineage[-1].until)
            train_part = partial(self._train, signals, notices=())
            begin = train_lineage(self.run, self.resolved, train_part)
            if isinstance(begin, Result):
                return begin
            checkpoint = begin
        return self._train(signals, self.run, self.resolved, checkpoint, self.until, self.notices)

    def _train(
        self,
        signals: Signals,
        run: RunFolder,
        resolved: ResolvedJob,
        checkpoint: CheckpointInfo | None,
        until: int | None,
        notices: tuple[str, ...],
    ) -> Result:
        def record(now: Prepared) -> None:
            if resolved.spec.lineage and checkpoint is not None and run.path != self.run.path:
                then = checkpoint.manifest.environment
                refuse_other_code(run, then, now, "Undo the change, or train the job anew.")
            run.write_environment(now.facts)
            keep_task(run, self.task, now.source, self.place)

        return _Part(run, resolved, record, checkpoint, self.runner, self.place, self.watch, until, notices).train(
            signals
        )


def _refuse_until(until: int | None, step: int) -> None:
    """A part that is to end before it begins."""
    if until is not None and until < max(step, 1):
        raise RequestError(f"until {until}: there is no such step ahead of step {step}, where training begins.")


def is_private(spec: JobSpec) -> bool:
    """Whether the job itself has a secret in it, which a resume needs: so it is kept, for its owner only."""
    values = spec.model_dump(mode="json")
    return any(job_secrets(spec)) or any(secrets_in(values)) or mask_all(values) != values


def _refuse_what_is_missing(spec: JobSpec) -> None:
    """Before anything is started."""
    _refuse_without_key(spec)
    _refuse_without_certificates(spec)
    refuse_missing_libraries(spec.track)
    refuse_missing_engine(spec)


def _refuse_without_key(spec: JobSpec) -> None:
    """Before anything is started: the first save would be too late."""
    if spec.checkpoint.encrypt is None:
        return
    try:
        read_key(spec.checkpoint.encrypt)
    except CheckpointError as error:
        raise RunError(f"checkpoint.encrypt: {error}") from None


def _refuse_without_certificates(spec: JobSpec) -> None:
    """Before there is a run: what makes certificates may not be installed."""
    if spec.encrypt is True or (spec.encrypt == "auto" and not isinstance(spec.engine, LocalSpec)):
        refuse_without_library()


@contextlib.contextmanager
def _restored_if_refused(run: RunFolder) -> Iterator[None]:
    """A refusal leaves the run as it was. It comes before the first step: what comes later is a failure."""
    job, result = run.job_file.read_text() if run.job_file.exists() else None, run.whole_result()
    try:
        yield
    except RequestError:
        if job is None:
            run.job_file.unlink(missing_ok=True)
        else:
            run.write_job(job, is_private=not run.job_file.stat().st_mode & 0o077)
        if result is not None:
            run.write_result(result)
        raise


def _adopt(
    run: RunFolder, resolved: ResolvedJob, checkpoint: CheckpointInfo, place: TaskLocation, now: Prepared
) -> None:
    """From here on the run is what is asked for now. Not earlier: a refused resume must change nothing."""
    recorded = recorded_environment(run, checkpoint)
    refuse_other_code(run, recorded, now, "Undo the change, or start a new run from its checkpoint with --branch.")
    for name, value in now.facts.items():
        if name != SOURCE and recorded.get(name, value) != value:
            log.warning("%s was %s when the run began and is %s now: the bits may differ", name, recorded[name], value)
    set_foreign_aside(run, resolved.spec)
    run.write_job(dump_job(resolved), is_private=is_private(resolved.spec))
    restore_environment(run, recorded, now.facts)
    keep_task(run, resolved.spec.task, now.source, place)
    # How an earlier part has ended would pass for the end of this one, should nobody live to write that.
    run.result_file.unlink(missing_ok=True)


@dataclass
class _Part:
    """One part of a run, from its launch to what it comes to: a run that is resumed has several.

    It knows whether a step of this part was done, what it has recovered from, and whether its end was told. `accept`
    refuses a machine or a task that does not fit the run.
    """

    run: RunFolder
    resolved: ResolvedJob
    accept: Callable[[Prepared], None]
    checkpoint: CheckpointInfo | None
    runner: Runner
    place: TaskLocation
    watch: Watch
    until: int | None = None
    notices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._spec = self.resolved.spec
        register_secrets(job_secrets(self._spec))
        self._workers = workers_here(self._spec, usable_cores())
        # First: what is switched on may be refused, and a display would be left open.
        self._observers = Observers(self.run, self._spec)
        self._display = Guarded(self.watch(RunStart(self.run, self._spec, self._workers)))
        self._has_trained = self._has_finished = self._has_ended = False
        self._recoveries = RecoveryLog()
        self._waiting = DataWaitLog()

    def train(self, signals: Signals) -> Result:
        """Launch its processes, show it, write down what it comes to, and wait for copies of its checkpoints."""
        place = Place("launcher", self.run.name)
        log_file = LogFile(self.run.logs / "launcher.jsonl", {"process": place.process})
        with contextlib.closing(log_file), also_logging(RecordHandler(place, log_file.append), self._spec.log_level):
            return self._train(signals)

    def _train(self, signals: Signals) -> Result:
        copied: list[dict[str, Any]] = []
        started = time.perf_counter()
        for notice in (*self.notices, *self._observers.notices):
            self._display.handle(LogMessage(level="info", message=notice))
        if (idle := idle_gpus(self._spec, self._workers)) is not None:
            log.warning("%s", idle)
            self._display.handle(LogMessage(level="warning", message=idle))
        try:
            # Before there are copiers, which write events themselves: those are news.
            events_from = end_of_events(self.run.events_file)
            copies = Copies(self.run, self._spec, self._handle)
            try:
                outcome = self._launch(events_from, copies.handle, signals)
                fields = self._conclude(outcome, time.perf_counter() - started)
                self._tell_end(RunFinished(weights_digest=str(fields.get("weights_digest", "")), result=fields))
            except QuorateError as error:
                self._tell_end(RunFailed.of(Failure.of(error)))
                raise
            finally:
                copied = copies.conclude(signals) if self._has_trained else copies.abandon()
        finally:
            self._display.close()
            self._observers.close()
        if copied:
            fields["copies"] = copied
            self._write_result(fields)
        return Result.of(self.run, fields)

    def _handle(self, event: Event) -> None:
        """Show an event. Not a failure: what ended the job is told once, by the error that is raised for it."""
        self._has_trained = self._has_trained or isinstance(event, StepCompleted)
        self._has_finished = self._has_finished or isinstance(event, RunFinished)
        self._has_ended = self._has_ended or isinstance(event, RunFinished | RunFailed)
        self._recoveries.handle(event)
        self._waiting.handle(event)
        if not isinstance(event, RunFailed):
            self._display.handle(event)
        self._observers.handle(event)

    def _tell_end(self, event: RunFinished | RunFailed) -> None:
        """Have observers hear of an end that no event of the run tells: before the first step, or on a full disk."""
        if not self._has_ended:
            self._observers.handle(event)

    def _launch(self, events_from: int, show: Callable[[Event], None], signals: Signals) -> Outcome:
        """Raises a refusal that comes before the first step; the rest is an outcome."""
        log.info("%d workers, lanes %d, task %s", self._workers, self._spec.lanes, self.place.reference)
        launch = Launch(
            self.run,
            self._spec,
            self._workers,
            _source_of_params(self.resolved),
            None if self.checkpoint is None else self.checkpoint.path,
            RunMode(until=self.until),
            task=self.place.reference,
            search_path=self.place.search_path,
            events_from=events_from,
        )
        try:
            return self.runner(launch, show, self.accept, signals)
        except QuorateError as error:
            if isinstance(error, RequestError) and not self._has_trained:
                raise
            return Outcome(Failure.of(error), {})

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
            "status": ENDINGS[result["ending"]],
            "from_step": 0 if self.checkpoint is None else self.checkpoint.cursor.step,
            **({} if "steps" in result else self._state_so_far()),
            **result,
            "wall_seconds": round(seconds, 3),
            "recoveries": recoveries,
        }
        wait = self._waiting.wait
        if wait.is_worth_telling:
            advice = self._waiting.advice(self._spec, usable_cores())
            fields["waiting_for_data"] = {"share": round(wait.share, 4), "seconds": wait.waited_s, "advice": advice}
        if self._has_trained and not self._has_finished:
            log.warning("the last events could not be written: %s ends too early", short_path(run.events_file))
        self._write_result(fields)
        return fields

    def _failed(self, failure: Failure, about: dict[str, Any], recoveries: list[dict[str, Any]]) -> QuorateError:
        """The error for a failure that stands in the run folder as well, unless it is a refusal, which changes nothing.

        Even where the request was to blame, a run that has trained tells of it and is kept.
        """
        failure = failure.masked()
        if self._has_trained and failure.exit_code == RequestError.exit_code:
            failure = failure.at(exit_code=JobError.exit_code)
        if failure.is_refusal:
            return failure.error()
        status = STOPPED.get(failure.exit_code, "failed")
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
        search = search_own(CheckpointFolder(self.run.checkpoints).search, lambda info: why_foreign(info, self._spec))
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
