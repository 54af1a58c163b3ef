"""What a run's folder says of its job and its environment, put right by its checkpoints, which hold both as well."""

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from quorate.api.remains import near
from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.selection import saved_job, why_foreign
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import CheckpointError, DamagedFileError, RunError
from quorate.spec.job import JobSpec
from quorate.spec.load import RECORDED, load_recorded, resolve_mapping
from quorate.spec.override import Override
from quorate.spec.resolved import ResolvedJob
from quorate.storage.atomic import move_into_place
from quorate.storage.run_folder import RunFolder

log = logging.getLogger(__name__)

OTHERS = "checkpoints-of-other-runs"


def recorded_job(run: RunFolder, environment: Mapping[str, str], overrides: Sequence[Override]) -> ResolvedJob:
    """The job of a run, with what is asked for now over it. Where its job.yaml is gone, a checkpoint holds it too."""
    return recorded_and_asked(run, environment, overrides)[1]


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
            f"{near(run.job_file)} is gone, and run {run.name} has no checkpoint that would hold the job. Put the file "
            "back, or start anew with quorate train."
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
        log.warning("%s is gone: the job in checkpoint %s is used", near(run.job_file), info.path.name)
        return job.model_dump()
    raise RunError(f"{near(run.job_file)} is gone, and {problems[0]}. Put the file back.")


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
            log.warning("checkpoint %s was moved to %s", info.path.name, near(aside))
