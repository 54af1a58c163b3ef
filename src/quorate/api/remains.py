"""What a run that did not complete has left, and what to type next."""

import os
import shlex
from pathlib import Path

from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import CheckpointError
from quorate.core.failure import CHECKPOINT_LOST, Failure, Remains
from quorate.spec.job import JobSpec
from quorate.storage.run_folder import RunFolder
from quorate.storage.run_search import runs_folder


def remains_of(run: RunFolder, spec: JobSpec, failure: Failure | None = None) -> Remains:
    """What a run has left that failed, or was stopped."""
    step = _newest_step(run)
    changes = failure is not None and failure.is_repeatable
    if step is None:
        command, advice = None, _without_checkpoint(spec, failure, changes)
    else:
        command = f"quorate resume {typed(run)}" + (" --branch" if changes else "")
        advice = _with_checkpoint(command, step, changes)
    return Remains(run.name, str(run.path), near(run.logs), command, advice)


def typed(run: RunFolder) -> str:
    """What a person types for the run, here: its name in the usual folder of runs, its path elsewhere."""
    return run.name if run.path.parent == runs_folder().absolute() else shlex.quote(near(run.path))


def near(path: Path) -> str:
    """A path as it can be typed here: relative, if it is below the working folder."""
    here = Path(os.path.realpath("."))
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _with_checkpoint(command: str, step: int, changes: bool) -> str:
    # The command comes first, where no terminal breaks it.
    if changes:
        return f"{command}  (once it is mended: goes on from step {step} in a new run)"
    return f"{command}  (goes on from step {step})"


def _without_checkpoint(spec: JobSpec, failure: Failure | None, changes: bool) -> str:
    again = "mend it and train again" if changes else "train again"
    if failure is not None and failure.kind == CHECKPOINT_LOST:
        return f"put a checkpoint back into the run and resume it, or {again}"
    if failure is None or not failure.step:
        return f"{again}; nothing was trained yet, so there is nothing to resume"
    rules = spec.checkpoint
    said = f"every: {rules.every}" if rules.every is not None else f"minutes: {rules.minutes_between or 0:g}"
    return f"{again}; no checkpoint was saved yet, so there is nothing to resume (checkpoint.{said})"


def _newest_step(run: RunFolder) -> int | None:
    try:
        saved = CheckpointFolder(run.checkpoints).list()
    except CheckpointError:
        return None  # trouble with the disk must not hide what has ended the job
    return saved[-1].cursor.step if saved else None
