"""`quorate.evaluate`: a run's checkpoint, evaluated again."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quorate.api.aside import Aside, held, run_aside
from quorate.api.interruption import passing_on_signals
from quorate.api.job import overrides_from
from quorate.api.recorded_run import recorded_and_asked, recorded_environment, warn_of_foreign
from quorate.api.result import refuse_without_average
from quorate.api.resumption import is_moved_task, listed
from quorate.api.session import refuse_in_worker
from quorate.api.task_place import find_task, is_other_code
from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.selection import LAST, Foreign, select, why_foreign
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import CheckpointError, RunError
from quorate.engines.fork_server_process import Prepared
from quorate.history.run_record import RunRecord
from quorate.spec.change import changes
from quorate.spec.job import CheckpointSpec
from quorate.spec.marks import Mark
from quorate.spec.override import Override
from quorate.spec.resolved import ResolvedJob
from quorate.storage.run_folder import RunFolder
from quorate.storage.run_search import runs_folder
from quorate.storage.scratch import scratch_folder
from quorate.training.run_mode import RunMode

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluation:
    """What a checkpoint's model gives on the validation set. `weights_digest` says which model it is, and `averaged`
    whether its parameters were the averages that the job keeps (`average`)."""

    run: str
    checkpoint: Path
    step: int
    metrics: dict[str, float]
    weights_digest: str
    averaged: bool = False


def evaluate(
    run: str | Path = LAST,
    checkpoint: str | int = LAST,
    overrides: Mapping[str, Any] | None = None,
    *,
    averaged: bool | None = None,
    runs: str | Path | None = None,
    task: Any = None,
) -> Evaluation:
    """Evaluate a run's checkpoint: ``last``, ``best`` or that of a step; the run stays as it is.

    `averaged`: with the averages of the parameters (True) or the parameters themselves (False), if the job keeps both;
    by default as the run itself evaluates.
    `overrides` (dotted keys) may change how it runs, and which data the task reads: ``{"params.data": "other"}``.
    `task` (a class, ``"file.py:Class"`` or ``"package.module:Class"``) says where the task is now, if it was moved.
    """
    layer = overrides_from("quorate.evaluate", overrides, task)
    with passing_on_signals():
        return evaluate_run(runs_folder(runs), str(run), checkpoint, os.environ, layer, averaged=averaged)


def evaluate_run(
    runs: Path,
    reference: str,
    which: str | int,
    environment: Mapping[str, str],
    overrides: Sequence[Override],
    *,
    averaged: bool | None = None,
) -> Evaluation:
    """Evaluate the checkpoint that `which` means of the run that `reference` means."""
    refuse_in_worker()
    run = RunFolder(RunFolder.find(runs, reference).path.absolute())
    recorded, resolved = recorded_and_asked(run, environment, overrides)
    _refuse_other_meaning(run, recorded, resolved)
    place = find_task(run, recorded.spec.task, resolved.spec.task)

    def warn_of_changed_code(now: Prepared) -> None:
        if is_other_code(run, recorded_environment(run, info), now):
            log.warning("the task's code has changed since run %s began; it is evaluated by the one of now", run.name)

    if averaged:
        refuse_without_average(run.name, resolved.spec)
    mode = RunMode(evaluates_only=True, averaged=averaged)
    with scratch_folder() as scratch:
        info, path = _chosen(
            run, which, resolved.spec.checkpoint, scratch, lambda info: why_foreign(info, recorded.spec)
        )
        warn_of_foreign(info, recorded.spec)
        _, result = run_aside(Aside(resolved, mode, path, warn_of_changed_code, place), scratch)
    if bad := result.get("bad_samples", {}).get("validation"):
        log.warning("bad samples of the validation set that were left out (on_bad_sample: skip): %s", f"{bad:,}")
    return Evaluation(
        run.name,
        info.path,
        info.cursor.step,
        result["final_metrics"],
        result["weights_digest"],
        mode.evaluates_averages(resolved.spec.average),
    )


def _chosen(
    run: RunFolder, which: str | int, rules: CheckpointSpec, scratch: Path, foreign: Foreign
) -> tuple[CheckpointInfo, Path]:
    """The checkpoint, and where to read it. What a running job removes in between is chosen anew, once."""

    def choose() -> tuple[CheckpointInfo, Path]:
        folder = CheckpointFolder.of_job(run.checkpoints, rules)
        info = select(run.name, folder, which, lambda: RunRecord.read(run).best, foreign)
        return info, held(run, info, scratch)

    try:
        return choose()
    except CheckpointError:
        return choose()


def _refuse_other_meaning(run: RunFolder, recorded: ResolvedJob, resolved: ResolvedJob) -> None:
    """Refuse what would evaluate something else than the run; which data the task reads is for `params` to say."""
    changed = [
        change
        for change in changes(recorded.spec, resolved.spec)
        if change.mark is Mark.MEANING and not change.key.startswith("params.") and not is_moved_task(change)
    ]
    if changed:
        raise RunError(
            f"run {run.name} cannot be evaluated as another job than it is: {listed(changed, resolved)}. "
            "Evaluate without the change; only params.… and keys that say how a job runs may be other ones."
        )
