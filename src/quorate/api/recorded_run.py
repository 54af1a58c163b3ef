"""What a run folder says of its job and its environment, corrected by its checkpoints, which hold both as well.

Also what is left of a run that did not complete, and what to type next.
"""

import contextlib
import logging
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.selection import saved_job, why_foreign
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import CheckpointError, DamagedFileError, RunError
from quorate.core.failure import CHECKPOINT_LOST, Failure, Remains
from quorate.spec.job import JobSpec
from quorate.spec.load import RECORDED, load_recorded, resolve_mapping
from quorate.spec.override import Override
from quorate.spec.resolved import ResolvedJob
from quorate.storage.atomic import move_into_place
from quorate.storage.run_folder import RunFolder, runs_folder

log = logging.getLogger(__name__)

OTHERS = "checkpoints-of-other-runs"


def recorded_job(run: RunFolder) -> ResolvedJob:
    """The job of a run. Where its job.yaml is gone, a checkpoint holds it too."""
    return recorded_and_asked(run, {}, [])[0]


def recorded_and_asked(
    run: RunFolder, environment: Mapping[str, str], overrides: Sequence[Override]
) -> tuple[ResolvedJob, ResolvedJob]:
    """The job of a run as it is recorded, and with what is asked for now over it.

    Nothing is written, also where the file is gone: whoever reads a run does not hold its lock.
    """
    if run.job_file.exists():
        return load_recorded(run.job_file, {}, []), load_recorded(run.job_file, environment, overrides)
    keys = _saved_keys(run)
    recorded, asked = (resolve_mapping(keys, RECORDED, *layers) for layers in (({}, []), (environment, overrides)))
    return replace(recorded, source=str(run.job_file)), replace(asked, source=str(run.job_file))


def _saved_keys(run: RunFolder) -> dict[str, Any]:
    """The job in the newest checkpoint that can be used."""
    saved = CheckpointFolder(run.checkpoints).list()
    # A checkpoint of another run may lie among them: this one is called after its job.
    own = [info for info in saved if run.name.startswith(f"{info.manifest.job.get('name')}-")] or list(saved)
    if not own:
        raise RunError(
            f"{short_path(run.job_file)} is gone, and run {run.name} has no checkpoint that would hold the job. "
            "Put the file back, or start anew with quorate train."
        )
    problems = []
    for info in reversed(own):
        job = saved_job(info)
        if job is None:
            problems.append(f"the job in checkpoint {info.path.name} cannot be read by this version of Quorate")
            continue
        try:
            # Under its own key; one that names none, beside others that do, is not taken at its word.
            CheckpointFolder.of_job(run.checkpoints, job.checkpoint).verify(info)
        except CheckpointError as error:
            problems.append(error.message.rstrip("."))
            continue
        log.warning("%s is gone: the job in checkpoint %s is used", short_path(run.job_file), info.path.name)
        return job.model_dump()
    raise RunError(f"{short_path(run.job_file)} is gone, and {problems[0]}. Put the file back.")


def recorded_environment(run: RunFolder, checkpoint: CheckpointInfo | None) -> dict[str, Any]:
    """What a run's bits depend on besides its job: by its file or, where that is gone or damaged, by a checkpoint."""
    saved = {} if checkpoint is None else checkpoint.manifest.environment
    try:
        return run.read_environment() or saved
    except DamagedFileError as error:
        if checkpoint is None:
            raise
        log.warning("%s (here: %s)", error, checkpoint.path.name)
        return saved


def restore_environment(run: RunFolder, recorded: Mapping[str, Any], names: Iterable[str]) -> None:
    """Write again what a run's bits depend on, where its file is gone or damaged."""
    with contextlib.suppress(DamagedFileError):
        if run.read_environment() is not None:
            return
    run.write_environment({name: recorded[name] for name in names if name in recorded})


def warn_of_foreign(info: CheckpointInfo, spec: JobSpec) -> None:
    """Warn of a checkpoint that is looked at as one of a run and is not."""
    if why := why_foreign(info, spec):
        log.warning("checkpoint %s is not of this run: %s", info.path.name, why)


def set_foreign_aside(run: RunFolder, spec: JobSpec) -> None:
    """Move checkpoints of other jobs out of the folder: whoever replaces a lost worker would go on from the newest."""
    for info in CheckpointFolder(run.checkpoints).list():
        if why_foreign(info, spec):
            aside = run.path / OTHERS
            try:
                aside.mkdir(exist_ok=True)
                move_into_place(info.path, aside / info.path.name)
            except OSError as error:
                raise RunError(
                    f"checkpoint {info.path.name} is not of run {run.name} and cannot be moved to {aside}: "
                    f"{error.strerror or error}. Move it away."
                ) from error
            log.warning("checkpoint %s was moved to %s", info.path.name, short_path(aside))


def remains_of(run: RunFolder, spec: JobSpec, failure: Failure | None = None) -> Remains:
    """What a run has left that failed, or was stopped."""
    try:
        saved = CheckpointFolder(run.checkpoints).list()
    except CheckpointError:
        saved = ()  # trouble with the disk must not hide what has ended the job
    changes = failure is not None and failure.is_repeatable
    if not saved:
        command, advice = (
            None,
            _without_checkpoint(spec, failure, "mend it and train again" if changes else "train again"),
        )
    else:
        # The command comes first, where no terminal breaks it.
        command, step = f"quorate resume {run_argument(run)}", saved[-1].cursor.step
        advice = f"{command}  (goes on from step {step})"
        if changes:
            command += " --branch"
            advice = f"{command}  (once it is mended: goes on from step {step} in a new run)"
    return Remains(run.name, str(run.path), short_path(run.logs), command, advice)


def run_argument(run: RunFolder) -> str:
    """What a person types for the run, here: its name in the usual folder of runs, its path elsewhere."""
    return run.name if run.path.parent == runs_folder().absolute() else shlex.quote(short_path(run.path))


def short_path(path: Path) -> str:
    """A path as it can be typed here: relative, if it is below the working folder."""
    here = Path(os.path.realpath("."))
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _without_checkpoint(spec: JobSpec, failure: Failure | None, again: str) -> str:
    if failure is not None and failure.kind == CHECKPOINT_LOST:
        return f"put a checkpoint back into the run and resume it, or {again}"
    if failure is None or not failure.step:
        return f"{again}; nothing was trained yet, so there is nothing to resume"
    rules = spec.checkpoint
    said = f"every: {rules.every}" if rules.every is not None else f"minutes: {rules.minutes_between or 0:g}"
    return f"{again}; no checkpoint was saved yet, so there is nothing to resume (checkpoint.{said})"
