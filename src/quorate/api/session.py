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
from quorate.core.errors import QuorateError, RequestError, RunError
from quorate.core.failure import Failure, JobFailed
from quorate.engines.local import Launch, LocalEngine
from quorate.observe.event import Event
from quorate.spec.change import refused_on_resume
from quorate.spec.load import load_recorded
from quorate.spec.override import Override
from quorate.spec.resolved import ResolvedJob, dump_job
from quorate.storage.atomic import write_atomically
from quorate.storage.run_folder import RunFolder

log = logging.getLogger(__name__)

SOURCE = "task source"
ENDINGS = {"complete": "complete", "early stop": "complete", "interrupted": "interrupted", "terminated": "terminated"}


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


def start(resolved: ResolvedJob, watch: Watch) -> Result:
    """Train a job in a new run folder."""
    refuse_in_worker()
    run = RunFolder.create(Path(resolved.spec.runs), resolved.spec.name)
    with run.lock():
        try:
            _record_job(run, resolved)
            return _run(run, resolved, watch, None, run.write_environment)
        except RequestError:
            # Nothing was trained: a mistake leaves no run behind.
            shutil.rmtree(run.path, ignore_errors=True)
            raise


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
    run = RunFolder.find(runs, reference)
    recorded = load_recorded(run.job_file, {}, [])
    resolved = load_recorded(run.job_file, environment, overrides)
    changed = refused_on_resume(recorded.spec, resolved.spec)
    if changed and not branch:
        raise RunError(
            f"run {run.name} means something else than what is asked for now: {'; '.join(map(str, changed))}. "
            "Resume without the change, or start a new run from its checkpoint with --branch."
        )
    if branch:
        return _branch(run, resolved, watch)
    with run.lock():
        checkpoint = _checkpoint_to_resume(run, resolved)
        _record_job(run, resolved)
        return _run(run, resolved, watch, checkpoint.path, lambda facts: _check_facts(run, facts))


def refuse_in_worker() -> None:
    """A script that trains as soon as it is imported would start a job inside its own job."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name in ("quorate.engines.nursery", "quorate.worker.__main__"):
        raise RequestError(
            "The task's file starts a job when it is imported, and workers import it. "
            'Put the call of quorate.train under `if __name__ == "__main__":`.'
        )


def _branch(parent: RunFolder, resolved: ResolvedJob, watch: Watch) -> Result:
    checkpoint = _newest_checkpoint(parent)
    run = RunFolder.create(Path(resolved.spec.runs), resolved.spec.name)
    with run.lock():
        _record_job(run, resolved)
        return _run(run, resolved, watch, checkpoint.path, run.write_environment)


def _checkpoint_to_resume(run: RunFolder, resolved: ResolvedJob) -> CheckpointInfo:
    result = run.read_result() or {}
    done = result.get("status") == "complete"
    recorded = load_recorded(run.job_file, {}, []).spec
    extended = (resolved.spec.steps, resolved.spec.epochs) != (recorded.steps, recorded.epochs)
    if done and not extended:
        flag = f"--steps {2 * recorded.steps}" if recorded.steps else f"--epochs {2 * (recorded.epochs or 1)}"
        raise RunError(
            f"run {run.name} is complete ({result.get('steps')} steps). "
            f"To train further, ask for more: quorate resume {run.name} {flag}"
        )
    return _newest_checkpoint(run)


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


def _record_job(run: RunFolder, resolved: ResolvedJob) -> None:
    try:
        write_atomically(run.job_file, dump_job(resolved))
    except OSError as error:
        raise RunError(f"cannot write {run.job_file}: {error.strerror}") from error


def _check_facts(run: RunFolder, facts: dict[str, str]) -> None:
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


def _run(
    run: RunFolder,
    resolved: ResolvedJob,
    watch: Watch,
    checkpoint: Path | None,
    check_facts: Callable[[dict[str, str]], None],
) -> Result:
    spec = resolved.spec
    workers = spec.worker_count(os.cpu_count() or 1)
    launch = Launch(run, spec, workers, resolved.source, checkpoint)
    show = watch(Begun(run, workers, spec.lanes))
    started = time.perf_counter()
    try:
        outcome = LocalEngine(launch, show.handle, check_facts).run()
    except QuorateError as error:
        if not isinstance(error, RequestError):
            _write_failure(run, Failure.of(error))
        raise
    finally:
        show.close()
    if outcome.failure is not None:
        _write_failure(run, outcome.failure)
        raise outcome.failure.error()
    fields = _result_fields(run, outcome.result, time.perf_counter() - started)
    run.write_result(fields)
    return Result.of(run, fields)


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


def _write_failure(run: RunFolder, failure: Failure) -> None:
    try:
        run.write_result({"run": run.name, "folder": str(run.path), "status": "failed", "failure": failure.to_dict()})
    except RunError as error:
        log.warning("%s", error)


def exit_code_of(error: QuorateError) -> int:
    """What the command line ends with."""
    return error.failure.exit_code if isinstance(error, JobFailed) else error.exit_code
