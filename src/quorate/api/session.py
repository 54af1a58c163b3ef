"""From a job to its result: a new run, or one that is resumed.

`start` and `resume` decide in which folder and from which checkpoint; a `Part` of the run does the rest for both.
"""

import contextlib
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

from quorate.api.job import job_text
from quorate.api.prints import Watch
from quorate.api.recorded_run import (
    newest_checkpoint,
    recorded_and_asked,
    recorded_environment,
    recorded_job,
    refuse_complete,
    refuse_early_stopped,
    refuse_edited_job,
    refuse_other_meaning,
    refuse_others_run,
    restore_environment,
    run_argument,
    set_foreign_aside,
    short_path,
    warn_of_damaged_result,
    warn_of_stretched_schedule,
)
from quorate.api.result import Result
from quorate.api.run_part import (
    Part,
    Runner,
    Setup,
    refuse_missing_engine,
    refuse_missing_libraries,
    run_locally,
    run_on_engine,
)
from quorate.api.tasks import TaskLocation, find_task, keep_task, refuse_other_code, with_task_at
from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import CheckpointError, JobError, QuorateError, RequestError, RunError
from quorate.core.failure import Failure, JobFailed, Remains
from quorate.core.gpus import gpus_here
from quorate.core.machine import usable_cores
from quorate.core.masking import mask_all, secrets_in
from quorate.core.runs_folder import is_copy
from quorate.core.user_code import is_attached
from quorate.engines.engine import SOURCE, Prepared
from quorate.spec.changes import PART, parts_of, with_branch
from quorate.spec.device import kind_of, workers_here
from quorate.spec.job import JobSpec, job_secrets
from quorate.spec.keys import AUTO_BATCH
from quorate.spec.override import Override, is_asked
from quorate.spec.resolved import ResolvedJob, dump_job
from quorate.spec.rules import checked_job
from quorate.storage.objects import open_store
from quorate.storage.run_folder import RunFolder
from quorate.storage.run_notes import forget_asked, forget_submission
from quorate.supervisor.signals import Signals, listening_to_signals
from quorate.supervisor.supervisor import Launch
from quorate.task.run_mode import MICRO_BATCH, PAUSED, RunMode
from quorate.wire.certificates import refuse_without_library

log = logging.getLogger(__name__)


def start(resolved: ResolvedJob, watch: Watch, runner: Runner = run_on_engine, *, until: int | None = None) -> Result:
    """Train a job in a new run folder.

    `until`: only up to this step, of which there is a checkpoint then; the run is interrupted there ("paused"), and a
    resume trains the rest, to the bits of one that was not. Where the job is no longer than that it is complete.
    """
    refuse_in_worker()
    _refuse_until(until, 0)
    setup = Setup(TaskLocation(resolved.spec.task), watch, runner, until)
    if resolved.spec.batch_size == AUTO_BATCH:
        with listening_to_signals() as signals:
            resolved, notice = with_batch_found(resolved, setup.place, signals)
        setup = replace(setup, notices=(notice,))
    return _train_in_new_run(resolved, Path(resolved.spec.runs), setup, None)


def resume(
    runs: Path,
    reference: str,
    environment: Mapping[str, str],
    overrides: Sequence[Override],
    *,
    watch: Watch,
    branch: bool = False,
    trust_source: bool = False,
    trust_job: bool = False,
    runner: Runner = run_on_engine,
    until: int | None = None,
) -> Result:
    """Resume from a run's newest whole checkpoint; as a branch, in a new run folder with changed meaning. `until` is
    that of `start`.

    Where the reference is a copy of a run at another place, that is fetched first; `trust_source` says that the task's
    source there may be run, and `trust_job` that what the job there names may be used.
    """
    refuse_in_worker()
    untrusted = ""
    if is_copy(reference):
        from quorate.api.fetch import fetch_run

        fetched = fetch_run(runs, reference, environment, overrides, trust_source=trust_source, trust_job=trust_job)
        reference, untrusted = str(fetched.path), fetched.untrusted
    run = RunFolder(RunFolder.find(runs, reference).path.absolute())
    refuse_others_run(runs, reference, run, environment, overrides, trust_job=trust_job)
    recorded, resolved = recorded_and_asked(run, environment, overrides)
    asked = resolved.spec.task if is_asked("task", environment, overrides) else None
    warn_of_damaged_result(run)
    refuse_early_stopped(run, recorded.spec, resolved.spec, branch)
    if branch:
        moved = resolved.spec.runs != recorded.spec.runs
        folder = Path(resolved.spec.runs) if moved else run.path.parent
        place = find_task(run, recorded.spec.task, asked, untrusted)
        checkpoint = newest_checkpoint(run, recorded.spec, resolved.spec.checkpoint)
        _refuse_until(until, checkpoint.cursor.step)
        resolved = with_branch(recorded.spec, with_task_at(resolved, place), checkpoint.cursor.step)
        return _train_in_new_run(resolved, folder, Setup(place, watch, runner, until), checkpoint)
    refuse_other_meaning(run, recorded, resolved)
    with run.lock():
        _refuse_request(run, recorded, resolved)
        place = find_task(run, recorded.spec.task, asked, untrusted)
        resolved, setup = with_task_at(resolved, place), Setup(place, watch, runner, until)
        if _is_on_the_way(run, recorded.spec):
            run.write_job(job_text(resolved), is_private=is_private(resolved.spec))
            with listening_to_signals() as signals:
                return _begin(run, resolved, setup, signals)
        checkpoint = _checkpoint_for(run, recorded, resolved)
        _refuse_until(until, checkpoint.cursor.step)
        return _continue(run, resolved, resolved, setup, checkpoint, forget_submission)


def _continue(
    run: RunFolder,
    asked: ResolvedJob,
    here: ResolvedJob,
    setup: Setup,
    checkpoint: CheckpointInfo,
    taken_up: Callable[[RunFolder], None],
) -> Result:
    """Train the job `asked` for from a checkpoint, as `here` says how it runs; a refusal leaves the run as it was."""

    def adopt(now: Prepared) -> None:
        _adopt(run, asked, checkpoint, setup.place, now)
        taken_up(run)

    # Not earlier: to read a checkpoint through may take long, and there is no job yet that a signal could stop.
    with listening_to_signals() as signals:
        part = Part(run, here, setup, adopt, checkpoint)
        with _restored_if_refused(run, part):
            return part.train(signals)


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


def resume_in(run: RunFolder, asked: ResolvedJob, here: ResolvedJob, setup: Setup) -> Result:
    """Resume a run whose resume was submitted elsewhere: the job `asked` for, which runs as `here` says. A refusal
    leaves all as it was, what was asked for included: whoever waits for the run is told by Ray why it has ended."""
    with run.lock():
        checkpoint = resumable(run, recorded_job(run), asked)
        try:
            result = _continue(run, asked, here, setup, checkpoint, forget_asked)
        except JobError:
            forget_asked(run)
            raise
        forget_asked(run)
        return result


def start_in(run: RunFolder, resolved: ResolvedJob, setup: Setup, checkpoint: CheckpointInfo | None = None) -> Result:
    """Train a job in a folder that was made for it elsewhere; from a `checkpoint`, as a branch of that one's run. A
    refusal is written there: nobody may see it here."""
    with listening_to_signals() as signals, run.lock():
        try:
            _refuse_what_is_missing(resolved.spec)
            # The task as whoever resumes it elsewhere finds it: the copy that is here goes with the cluster.
            return _begin(run, resolved, setup, signals, checkpoint)
        except RequestError as error:
            about = {"run": run.name, "folder": str(run.path), "recoveries": []}
            run.write_result({**about, "status": "failed", "failure": Failure.of(error).masked().to_dict()})
            raise


def refuse_in_worker() -> None:
    """A script that trains as soon as it is imported would start a job inside its own job."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    is_worker = spec is not None and spec.name in ("quorate.engines.fork_server", "quorate.worker.__main__")
    if is_worker or is_attached():
        raise RequestError(
            "The task's file starts a job when it is imported, and workers import it. "
            'Put the call of quorate.train under `if __name__ == "__main__":`.'
        )


def _train_in_new_run(resolved: ResolvedJob, folder: Path, setup: Setup, checkpoint: CheckpointInfo | None) -> Result:
    if resolved.spec.batch_size == AUTO_BATCH:
        raise RequestError("batch_size: auto is for a new run. Give a branch a number; its run has found one.")
    text = job_text(resolved)
    _refuse_what_is_missing(resolved.spec)
    with listening_to_signals() as signals:
        # In a storage that others have, too, its name is not that of another run.
        engine = resolved.spec.engine
        storage = Path(engine.shared_storage) if engine.shared_storage else None
        beside = storage if engine.object_store is None else open_store(engine.object_store)
        run = RunFolder.create(folder.absolute(), resolved.spec.name, beside=beside)
        with run.lock():
            try:
                run.write_job(text, is_private=is_private(resolved.spec))
                if run.path.parent.parent in Path.cwd().parents:  # not where a person looks first
                    told = f"{run.name} lies in {run.path.parent}: the nearest folder above that has runs"
                    setup = replace(setup, notices=(*setup.notices, told))
                return _begin(run, resolved, setup, signals, checkpoint)
            except RequestError:
                # A mistake leaves no run behind, unless it showed so late that there is something to lose.
                if not CheckpointFolder.at(run.checkpoints).list() and not _has_trained_parts(run):
                    shutil.rmtree(run.path, ignore_errors=True)
                raise


def _begin(
    run: RunFolder,
    resolved: ResolvedJob,
    setup: Setup,
    signals: Signals,
    checkpoint: CheckpointInfo | None = None,
) -> Result:
    """Train the first part of a run, after those of its lineage; a branch, which begins from a checkpoint, has that
    behind it."""

    def train(folder: RunFolder, job: ResolvedJob, checkpoint: CheckpointInfo | None, setup: Setup) -> Result:
        def record(now: Prepared) -> None:
            if job.spec.lineage and checkpoint is not None and folder.path != run.path:
                then = checkpoint.manifest.environment
                refuse_other_code(folder, then, now, "Undo the change, or train the job again from the start.")
            folder.write_environment(now.facts)
            keep_task(folder, resolved.spec.task, now.source, setup.place)

        return Part(folder, job, setup, record, checkpoint).train(signals)

    if resolved.spec.lineage and checkpoint is None:
        _refuse_until(setup.until, resolved.spec.lineage[-1].until)
        begin = _train_lineage(run, resolved, setup, train)
        if isinstance(begin, Result):
            return begin
        checkpoint = begin
    return train(run, resolved, checkpoint, setup)


def _lineage_folder(run: RunFolder) -> Path:
    """Where the parts of a run are."""
    return run.path / "lineage"


def _is_on_the_way(run: RunFolder, spec: JobSpec) -> bool:
    """Whether a run has still to train what its job was before."""
    return bool(spec.lineage) and _lineage_folder(run).is_dir() and not CheckpointFolder.at(run.checkpoints).list()


def _has_trained_parts(run: RunFolder) -> bool:
    """Whether there is anything to lose."""
    parts = RunFolder.all_in(_lineage_folder(run))
    return any(CheckpointFolder.at(part.checkpoints).list() for part in parts)


def _train_lineage(
    run: RunFolder,
    resolved: ResolvedJob,
    setup: Setup,
    train: Callable[[RunFolder, ResolvedJob, CheckpointInfo | None, Setup], Result],
) -> CheckpointInfo | Result:
    """Train what a job was before: each part of its lineage is a run of its own inside the run, which it leads to.

    The checkpoint that the run begins from or, where somebody has stopped it on the way, what the run has come to.
    """
    folder = _lineage_folder(run)
    checkpoint = None
    for number, (job, entry) in enumerate(zip(parts_of(resolved), resolved.spec.lineage, strict=True), start=1):
        part = RunFolder(folder / f"{PART}-{number:04}")
        if not part.job_file.exists():
            part = RunFolder.create(folder, PART)
            part.write_job(job_text(job), is_private=not run.job_file.stat().st_mode & 0o077)
        if (part.whole_result() or {}).get("ending") != PAUSED:
            is_begun = bool(CheckpointFolder.at(part.checkpoints).list())
            own = newest_checkpoint(part, job.spec, job.spec.checkpoint) if is_begun else None
            part.result_file.unlink(missing_ok=True)
            try:
                with part.lock():
                    result = train(part, job, own or checkpoint, replace(setup, until=entry.until, notices=()))
            except JobFailed as failed:
                raise _failed_part(run, failed) from None
            if result.fields.get("ending") != PAUSED:
                return _stopped_on_the_way(run, result)
        checkpoint = newest_checkpoint(part, job.spec, job.spec.checkpoint)
    assert checkpoint is not None
    return checkpoint


def _stopped_on_the_way(run: RunFolder, result: Result) -> Result:
    about = {"run": run.name, "folder": str(run.path)}
    if result.status == "complete":
        raise RunError(
            f"a part of the lineage of run {run.name} ends after step {result.steps}, before the next begins"
        )
    run.write_result(fields := {**result.fields, **about})
    return Result.of(run, fields)


def _failed_part(run: RunFolder, failed: JobFailed) -> JobFailed:
    """The failure of a part is one of the run."""
    about = {"run": run.name, "folder": str(run.path), "status": failed.failure.stopped or "failed", "recoveries": []}
    with contextlib.suppress(QuorateError):
        run.write_result({**about, "failure": failed.failure.to_dict()})
    command = f"quorate resume {run_argument(run)}"
    logs = short_path(Path(failed.remains.logs)) if failed.remains else short_path(run.logs)
    remains = Remains(run.name, str(run.path), logs, command, f"{command}  (continues its lineage)")
    return JobFailed(failed.failure, remains)


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
    refuse_missing_engine(spec)  # its extra has what the next ones may lack, too
    _refuse_without_key(spec)
    if spec.encrypt is True or (spec.encrypt == "auto" and spec.engine.is_cluster):
        refuse_without_library()  # for what makes certificates
    refuse_missing_libraries(spec.track)


def _refuse_without_key(spec: JobSpec) -> None:
    """Before anything is started: the first save would be too late."""
    if spec.checkpoint.sealing is None:
        return
    try:
        resolve_name(spec.checkpoint.sealing.opened_by)(spec.checkpoint.sealing)
    except CheckpointError as error:
        raise RunError(f"checkpoint.encrypt: {error}") from None


@contextlib.contextmanager
def _restored_if_refused(run: RunFolder, part: Part) -> Iterator[None]:
    """A refusal leaves the run as it was. It comes before the first step: what comes later is a failure. A run that was
    complete is so still until there is a step more."""
    job, result = run.job_file.read_text() if run.job_file.exists() else None, run.whole_result()
    try:
        yield
    except (RequestError, JobFailed) as error:
        failed = error if isinstance(error, JobFailed) else None
        if failed is not None and (part.has_trained or (result or {}).get("status") != "complete"):
            raise
        if job is None:
            run.job_file.unlink(missing_ok=True)
        else:
            run.write_job(job, is_private=not run.job_file.stat().st_mode & 0o077)
        if result is not None:
            run.write_result(result)
        if failed is not None and failed.remains is not None:
            advice = f"run {run.name} is complete, as it was; once this is mended, give the same command again"
            raise JobFailed(failed.failure, replace(failed.remains, resume=None, advice=advice)) from None
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


BATCH_FOUND = "auto: the largest that fits"


def with_batch_found(resolved: ResolvedJob, place: TaskLocation, signals: Signals) -> tuple[ResolvedJob, str]:
    """The job with a number for `batch_size: auto`, and what to tell of it.

    Memory is needed for one micro-batch at a time, whoever hosts its lane; so that is what is tried, and the batch is
    as many of them as a step has.
    """
    spec = resolved.spec
    each = spec.lanes * spec.accumulate
    tried = spec.model_copy(update={"batch_size": each, "port": 0, "workers": 1, "min_workers": 1, "spares": 0})
    tried = tried.model_copy(update={"track": None, "notify": None, "loader_workers": 0})
    with tempfile.TemporaryDirectory(prefix="quorate-batch-") as scratch:
        folder = RunFolder.create(Path(scratch), spec.name)
        mode = RunMode(batch_for=_sharing(spec))
        launch = Launch(folder, tried, 1, resolved.source, None, mode, place.reference, place.search_path)
        outcome = run_locally(launch, lambda _: None, lambda _: None, signals)
    if outcome.failure is not None:
        raise outcome.failure.error()
    if outcome.result["ending"] == signals.reason:
        raise JobFailed(signals.failure(f"{signals.reason}; no run was begun."))
    samples = int(outcome.result["final_metrics"][MICRO_BATCH])
    number = samples * each
    found = checked_job(spec.model_dump() | {"batch_size": number})
    parts = f" in {spec.accumulate} micro-batches" if spec.accumulate > 1 else ""
    told = f"batch_size: auto is {number:,}: {samples:,} samples at a time, in each of {spec.lanes} lanes{parts}"
    return replace(resolved, spec=found, origins=resolved.origins | {"batch_size": BATCH_FOUND}), told


def _sharing(spec: JobSpec) -> int:
    """How many workers, and on GPUs servers, have one device's memory between them."""
    workers = workers_here(spec, usable_cores())
    if kind_of(spec) == "cpu":
        return workers
    return -(-(workers + spec.strategy.server_count) // max(1, len(gpus_here())))
