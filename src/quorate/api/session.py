"""Running a job in its folder: a new run, or one that goes on."""

import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from quorate.api.result import Result
from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.store import CheckpointFolder
from quorate.coordinator.client import Outcome
from quorate.core.errors import QuorateError, RequestError, RunError
from quorate.core.failure import Failure, JobFailed
from quorate.engines.local import Launch, LocalEngine
from quorate.engines.signals import Signals, listening_to_signals
from quorate.observe.event import Event
from quorate.spec.change import refused_on_resume
from quorate.spec.job import JobSpec
from quorate.spec.load import load_recorded
from quorate.spec.override import Override
from quorate.spec.resolved import ResolvedJob, dump_job
from quorate.storage.run_folder import RunFolder

log = logging.getLogger(__name__)

SOURCE = "task source"
EARLY_STOP = "early stop"
ENDINGS = {"complete": "complete", EARLY_STOP: "complete", "interrupted": "interrupted", "terminated": "terminated"}
STOPPED = {130: "interrupted", 143: "terminated"}


@dataclass(frozen=True)
class Begun:
    """What is known when a run begins, for whoever shows it."""

    run: RunFolder
    workers: int
    lanes: int


class Show(Protocol):
    """Shows how a run goes on."""

    def handle(self, event: Event) -> None:
        """Show an event."""
        ...

    def close(self) -> None:
        """Nothing more will come."""
        ...


class Silence:
    """Shows nothing."""

    def handle(self, event: Event) -> None:
        """Say nothing."""

    def close(self) -> None:
        """Still nothing."""


Watch = Callable[[Begun], Show]
"""Called once when a run begins; what it returns is told every event, and then that there are no more."""

Facts = dict[str, str]


@dataclass(frozen=True)
class Plan:
    """A run that is about to be trained. `accept_facts` refuses a machine or a task that does not fit the run."""

    run: RunFolder
    resolved: ResolvedJob
    accept_facts: Callable[[Facts], None]
    checkpoint: CheckpointInfo | None = None


def start(resolved: ResolvedJob, watch: Watch) -> Result:
    """Train a job in a new run folder."""
    refuse_in_worker()
    return _train_in_new_run(resolved, Path(resolved.spec.runs), watch, checkpoint=None)


def resume(
    runs: Path,
    reference: str,
    environment: Mapping[str, str],
    overrides: Sequence[Override],
    *,
    watch: Watch,
    branch: bool = False,
) -> Result:
    """Go on from a run's newest whole checkpoint; as a branch, in a new run folder with changed meaning."""
    refuse_in_worker()
    run = RunFolder(RunFolder.find(runs, reference).path.absolute())
    recorded = load_recorded(run.job_file, {}, [])
    resolved = load_recorded(run.job_file, environment, overrides)
    _refuse_early_stopped(run, recorded.spec, resolved.spec, branch)
    if branch:
        moved = resolved.spec.runs != recorded.spec.runs
        folder = Path(resolved.spec.runs) if moved else run.path.parent
        return _train_in_new_run(resolved, folder, watch, checkpoint=_newest_checkpoint(run))
    _refuse_other_meaning(run, recorded, resolved)
    with listening_to_signals() as signals, run.lock():
        _refuse_complete(run, recorded.spec, resolved.spec)
        _warn_of_stretched_schedule(recorded.spec, resolved.spec)
        plan = Plan(run, resolved, lambda facts: _take_up(run, resolved, facts), _newest_checkpoint(run))
        return _train(plan, watch, signals)


def refuse_in_worker() -> None:
    """A script that trains as soon as it is imported would start a job inside its own job."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name in ("quorate.engines.nursery", "quorate.worker.__main__"):
        raise RequestError(
            "The task's file starts a job when it is imported, and workers import it. "
            'Put the call of quorate.train under `if __name__ == "__main__":`.'
        )


def _train_in_new_run(resolved: ResolvedJob, folder: Path, watch: Watch, checkpoint: CheckpointInfo | None) -> Result:
    with listening_to_signals() as signals:
        run = RunFolder.create(folder.absolute(), resolved.spec.name)
        with run.lock():
            try:
                run.write_job(dump_job(resolved))
                return _train(Plan(run, resolved, run.write_environment, checkpoint), watch, signals)
            except RequestError:
                # A mistake leaves no run behind, unless it showed so late that there is something to lose.
                if not CheckpointFolder(run.checkpoints).list():
                    shutil.rmtree(run.path, ignore_errors=True)
                raise


def _refuse_other_meaning(run: RunFolder, recorded: ResolvedJob, resolved: ResolvedJob) -> None:
    changed = refused_on_resume(recorded.spec, resolved.spec)
    if changed:
        raise RunError(
            f"run {run.name} means something else than what is asked for now: {'; '.join(map(str, changed))}. "
            "Resume without the change, or start a new run from its checkpoint with --branch."
        )


def _refuse_complete(run: RunFolder, recorded: JobSpec, asked: JobSpec) -> None:
    result = run.read_result() or {}
    if result.get("status") == "complete" and (asked.steps, asked.epochs) == (recorded.steps, recorded.epochs):
        flag = f"--steps {2 * recorded.steps}" if recorded.steps else f"--epochs {2 * (recorded.epochs or 1)}"
        raise RunError(
            f"run {run.name} is complete ({result.get('steps')} steps). "
            f"To train further, ask for more: quorate resume {run.name} {flag}"
        )


def _refuse_early_stopped(run: RunFolder, recorded: JobSpec, asked: JobSpec, branch: bool) -> None:
    """However many steps are asked for: its patience is at its end, so it would end again where it begins."""
    result = run.read_result() or {}
    if result.get("ending") != EARLY_STOP or (branch and asked.early_stop != recorded.early_stop):
        return
    why = recorded.early_stop
    rule = f"early_stop: {why.metric}, patience {why.patience}" if why else "early_stop"
    raise RunError(
        f"run {run.name} stopped early ({rule}) after {result.get('steps')} steps; start a branch without early_stop: "
        f"quorate resume {run.name} --branch --set early_stop=null"
    )


def _warn_of_stretched_schedule(recorded: JobSpec, asked: JobSpec) -> None:
    is_longer = (asked.steps, asked.epochs) != (recorded.steps, recorded.epochs)
    if is_longer and asked.schedule is not None and asked.schedule.kind != "constant":
        log.warning(
            "the rate of a %s schedule depends on how long the job is, so from here on it differs from that of a job "
            "that was this long from the start",
            asked.schedule.kind,
        )


def _take_up(run: RunFolder, resolved: ResolvedJob, facts: Facts) -> None:
    """From here on the run is what is asked for now. Not earlier: a refused resume must change nothing."""
    _check_facts(run, facts)
    run.write_job(dump_job(resolved))
    # How an earlier part has ended would pass for the end of this one, should nobody live to write that.
    run.result_file.unlink(missing_ok=True)


def _newest_checkpoint(run: RunFolder) -> CheckpointInfo:
    search = CheckpointFolder(run.checkpoints).search()
    for skipped in search.skipped:
        log.warning("checkpoint %s is not used: %s", skipped.path.name, skipped.reason)
    if search.newest is None:
        broken = "; ".join(f"{skipped.path.name}: {skipped.reason}" for skipped in search.skipped)
        why = f"none of its checkpoints is whole ({broken})" if broken else "it ended before its first checkpoint"
        raise RunError(
            f"run {run.name} has nothing to go on from: {why}. Start it anew with "
            f"quorate train; `checkpoint: {{every: N}}` saves every N steps."
        )
    return search.newest


def _check_facts(run: RunFolder, facts: Facts) -> None:
    recorded = run.read_environment() or {}
    if recorded.get(SOURCE, facts[SOURCE]) != facts[SOURCE]:
        raise RunError(
            f"the task's source has changed since run {run.name} began (digest {recorded[SOURCE][:12]}… then, "
            f"{facts[SOURCE][:12]}… now), so it would not produce what it promised. "
            "Restore the source, or start a new run from its checkpoint with --branch."
        )
    for name, value in facts.items():
        if recorded.get(name, value) != value:
            log.warning("%s was %s when the run began and is %s now: the bits may differ", name, recorded[name], value)


def _train(plan: Plan, watch: Watch, signals: Signals) -> Result:
    run, spec = plan.run, plan.resolved.spec
    cores = len(os.sched_getaffinity(0))
    workers = spec.worker_count(cores)
    _warn_of_crowd(workers, spec.threads, cores)
    checkpoint = None if plan.checkpoint is None else plan.checkpoint.path
    show = watch(Begun(run, workers, spec.lanes))
    launch = Launch(run, spec, workers, plan.resolved.source, checkpoint)
    started = time.perf_counter()
    try:
        outcome = LocalEngine(launch, _without_failure(show), plan.accept_facts, signals).run()
    except RequestError:
        raise
    except QuorateError as error:
        outcome = Outcome(Failure.of(error), {})
    finally:
        show.close()
    if outcome.failure is not None:
        raise _failed(run, outcome.failure)
    fields = _result_fields(run, outcome.result, time.perf_counter() - started)
    run.write_result(fields)
    return Result.of(run, fields)


def _warn_of_crowd(workers: int, threads: int, cores: int) -> None:
    if workers * threads > cores:
        log.warning(
            "%d workers × %d threads = %d, more than the %d cores here: they take turns, which is slower "
            "(same result; fewer `workers` may be faster)",
            workers,
            threads,
            workers * threads,
            cores,
        )


def _without_failure(show: Show) -> Callable[[Event], None]:
    """What ended the job is told once, by the error that is raised for it."""

    def handle(event: Event) -> None:
        if event.kind != "failure":
            show.handle(event)

    return handle


def _failed(run: RunFolder, failure: Failure) -> QuorateError:
    """The error for a failure that stands in the run folder as well."""
    status = STOPPED.get(failure.exit_code, "failed")
    try:
        run.write_result({"run": run.name, "folder": str(run.path), "status": status, "failure": failure.to_dict()})
    except QuorateError as error:
        log.info("%s", error)  # trouble with writing down why the job ended must not hide why it ended
    return failure.error() if failure.exit_code == RequestError.exit_code else JobFailed(failure, run.name)


def _result_fields(run: RunFolder, result: dict[str, Any], seconds: float) -> dict[str, Any]:
    ending = result["ending"]
    nothing: dict[str, Any] = {"steps": 0, "weights_digest": "", "samples_per_second": 0.0, "final_metrics": {}}
    return {
        "run": run.name,
        "folder": str(run.path),
        "status": ENDINGS[ending],
        **nothing,
        **result,
        "wall_seconds": round(seconds, 3),
        "recoveries": [],
    }
