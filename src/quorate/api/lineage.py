"""Training what a job was before: each part of its lineage is a run of its own inside the run, which it leads to."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from quorate.api.job import job_text
from quorate.api.recorded_run import newest_checkpoint, run_argument, short_path
from quorate.api.result import Result
from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import QuorateError, RunError
from quorate.core.failure import JobFailed, Remains
from quorate.spec.changes import PART, parts_of
from quorate.spec.job import JobSpec
from quorate.spec.resolved import ResolvedJob
from quorate.storage.run_folder import RunFolder
from quorate.training.run_mode import PAUSED

Trainer = Callable[[RunFolder, ResolvedJob, CheckpointInfo | None, int], Result]
"""Trains a part in a folder, from a checkpoint, until a step."""


def lineage_folder(run: RunFolder) -> Path:
    """Where the parts of a run are."""
    return run.path / "lineage"


def is_on_the_way(run: RunFolder, spec: JobSpec) -> bool:
    """Whether a run has still to train what its job was before."""
    return bool(spec.lineage) and lineage_folder(run).is_dir() and not CheckpointFolder.at(run.checkpoints).list()


def has_trained_parts(run: RunFolder) -> bool:
    """Whether there is anything to lose."""
    parts = RunFolder.all_in(lineage_folder(run))
    return any(CheckpointFolder.at(part.checkpoints).list() for part in parts)


def train_lineage(run: RunFolder, resolved: ResolvedJob, train: Trainer) -> CheckpointInfo | Result:
    """Train the parts that are not done yet: the checkpoint that the run begins from or, where somebody has stopped it
    on the way, what the run has come to."""
    folder = lineage_folder(run)
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
                    result = train(part, job, own or checkpoint, entry.until)
            except JobFailed as failed:
                raise _failed(run, failed) from None
            if result.fields.get("ending") != PAUSED:
                return _stopped(run, result)
        checkpoint = newest_checkpoint(part, job.spec, job.spec.checkpoint)
    assert checkpoint is not None
    return checkpoint


def _stopped(run: RunFolder, result: Result) -> Result:
    about = {"run": run.name, "folder": str(run.path)}
    if result.status == "complete":
        raise RunError(
            f"a part of the lineage of run {run.name} ends after step {result.steps}, before the next begins"
        )
    run.write_result(fields := {**result.fields, **about})
    return Result.of(run, fields)


def _failed(run: RunFolder, failed: JobFailed) -> JobFailed:
    """The failure of a part is one of the run."""
    status = {130: "interrupted", 143: "terminated"}.get(failed.exit_code, "failed")
    about = {"run": run.name, "folder": str(run.path), "status": status, "recoveries": []}
    with suppress(QuorateError):
        run.write_result({**about, "failure": failed.failure.to_dict()})
    command = f"quorate resume {run_argument(run)}"
    logs = short_path(Path(failed.remains.logs)) if failed.remains else short_path(run.logs)
    remains = Remains(run.name, str(run.path), logs, command, f"{command}  (continues its lineage)")
    return JobFailed(failed.failure, remains)
