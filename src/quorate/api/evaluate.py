"""`quorate.evaluate`, `quorate predict`, and how a job's code runs beside its run: in a folder that is thrown away."""

import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from quorate.api.job import overrides_from
from quorate.api.prints import NoDisplay, RunStart, Watch, WithPrints
from quorate.api.recorded_run import (
    chosen_checkpoint,
    is_moved_task,
    listed,
    recorded_and_asked,
    recorded_environment,
    refuse_lost_checkpoints,
)
from quorate.api.result import refuse_without_average
from quorate.api.run_part import run_locally
from quorate.api.session import refuse_in_worker
from quorate.api.tasks import TaskLocation, find_task, is_other_code, refuse_others_task
from quorate.api.train import passing_on_signals
from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.selection import LAST
from quorate.core.digests import content_digest
from quorate.core.errors import CheckpointError, RequestError, RunError
from quorate.core.failure import JobFailed
from quorate.core.installation import install_of
from quorate.core.machine import usable_cores
from quorate.core.runs_folder import runs_folder
from quorate.engines.engine import SOURCE, Prepared
from quorate.observe.sinks import Guarded, Round
from quorate.spec.changes import changes
from quorate.spec.device import workers_here
from quorate.spec.keys import Mark
from quorate.spec.options import LocalSpec
from quorate.spec.override import Override, is_asked
from quorate.spec.resolved import ResolvedJob
from quorate.storage.atomic import move_into_place, temporary_of, write_atomically
from quorate.storage.run_folder import RunFolder, why_untrusted
from quorate.supervisor.signals import listening_to_signals
from quorate.supervisor.supervisor import Launch
from quorate.training.run_mode import RunMode

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluation:
    """The metrics of a checkpoint's model on the validation set.

    `weights_digest` identifies the model; `averaged` says whether the averaged weights (`average`) were evaluated.
    """

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
    trust_job: bool = False,
    test: bool = False,
) -> Evaluation:
    """Evaluate a checkpoint of a run on the validation set: ``"last"``, ``"best"`` or that of a step.

    The run is not changed. `averaged` chooses the averaged weights (True) or the trained ones (False), if the job keeps
    both; by default those that the job evaluates.
    `overrides` (dotted keys) may change keys that affect only how the job runs, and the data that the task reads:
    ``{"params.data": "other"}``.
    `task` (a class, ``"file.py:Class"`` or ``"package.module:Class"``) says where the task is now, if it has moved.
    `trust_job`: load the task that the job names, also if `run` is a path and others can write there.
    `test`: evaluate on the third dataset that datasets() gives, the test set.
    """
    layer = overrides_from("quorate.evaluate", overrides, task)
    asked = Asked(runs_folder(runs), str(run), checkpoint, os.environ, layer, trust_job)
    with passing_on_signals():
        return evaluate_run(asked, averaged, "test" if test else "")


@dataclass(frozen=True)
class Asked:
    """Which run and checkpoint a person means, what to put over its job, and who watches."""

    runs: Path
    reference: str
    which: str | int
    environment: Mapping[str, str]
    overrides: Sequence[Override]
    trust_job: bool = False
    watch: Watch = lambda _: NoDisplay()


def evaluate_run(asked: Asked, averaged: bool | None = None, data: str = "") -> Evaluation:
    """Evaluate a checkpoint of a run on the set that `data` names."""
    mode = RunMode(evaluates_only=True, averaged=averaged, data=data)
    run, info, resolved, result = look_at_checkpoint(asked, mode)
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


def look_at_checkpoint(
    asked: Asked,
    mode: RunMode,
    accept: Callable[[RunFolder, CheckpointInfo, Prepared], None] = lambda _run, _info, _now: None,
) -> tuple[RunFolder, CheckpointInfo, ResolvedJob, dict[str, Any]]:
    """Have workers do what `mode` says with a checkpoint, beside its run, and return what comes of it. `accept` is told
    what is looked at before they are started."""
    refuse_in_worker()
    run = RunFolder(RunFolder.find(asked.runs, asked.reference).path.absolute())
    names_task = is_asked("task", asked.environment, asked.overrides)
    if not asked.trust_job and not names_task:
        refuse_others_task(why_untrusted(asked.runs, asked.reference, run.path), run)
    recorded, resolved = recorded_and_asked(run, asked.environment, asked.overrides)
    _refuse_other_meaning(run, recorded, resolved)
    place = find_task(run, recorded.spec.task, resolved.spec.task if names_task else None)

    def look(now: Prepared) -> None:
        if is_other_code(run, recorded_environment(run, info), now):
            log.warning("the task's code has changed since run %s began; the current code evaluates it", run.name)
        accept(run, info, now)

    def choose(scratch: Path) -> tuple[CheckpointInfo, Path]:
        _, info = chosen_checkpoint(run, recorded.spec, asked.which, resolved.spec.checkpoint)
        return info, hold_checkpoint(run, info, scratch)

    if mode.averaged:
        refuse_without_average(run.name, resolved.spec)
    refuse_lost_checkpoints(run, recorded.spec, "evaluate")
    with scratch_folder() as scratch:
        try:
            info, path = choose(scratch)
        except CheckpointError:  # what a running job removes in between is chosen anew, once
            info, path = choose(scratch)
        _, result = run_in_scratch(scratch, resolved, mode, path, look, place, watch=asked.watch)
    return run, info, resolved, result


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


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for what nobody will look at later."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="quorate-aside-", ignore_cleanup_errors=True)
    except OSError as error:
        raise RequestError(
            f"cannot make a folder for temporary files: {error.strerror or error}. Choose another with TMPDIR."
        ) from error
    with folder as name:
        yield Path(name)


def hold_checkpoint(run: RunFolder, info: CheckpointInfo, scratch: Path) -> Path:
    """Where a checkpoint of a run can be read for as long as it takes: a job that is under way prunes its own."""
    if run.holder() is None:
        return info.path
    safe = scratch / "held" / info.path.name
    safe.mkdir(parents=True)
    try:
        for file in info.path.iterdir():
            try:
                os.link(file, safe / file.name)
            except OSError:  # another disk, or one without links
                shutil.copyfile(file, safe / file.name)
    except FileNotFoundError as error:
        shutil.rmtree(safe)
        raise CheckpointError(
            f"checkpoint {info.path.name} of run {run.name} was removed by the running job, which keeps the last "
            "`checkpoint.keep`. Try again"
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"cannot copy checkpoint {info.path.name} of run {run.name}, which is running, to {scratch}: "
            f"{error.strerror or error}. Choose another folder with TMPDIR, or wait for the run's end"
        ) from error
    return safe


def run_in_scratch(
    scratch: Path,
    resolved: ResolvedJob,
    mode: RunMode,
    checkpoint: Path | None,
    accept: Callable[[Prepared], None],
    place: TaskLocation,
    micro_batches: Sequence[tuple[int, int]] = (),
    watch: Watch = lambda _: NoDisplay(),
) -> tuple[RunFolder, dict[str, Any]]:
    """Run a job beside its run, in a folder below `scratch`; that folder and its result. `accept` refuses a machine or
    a task that does not fit. Steps are cut as the run has cut them. An interruption raises `JobFailed` too."""
    # Its recorded port may be in use: by the very run that it stands beside. One run of a few steps is done sooner here
    # than it is placed in a cluster.
    spec = resolved.spec.model_copy(update={"port": 0, "engine": LocalSpec()})
    workers = workers_here(spec, usable_cores())
    with listening_to_signals() as signals:
        run = RunFolder.create(scratch, spec.name)
        if micro_batches:
            run.write_micro_batches(micro_batches)
        launch = Launch(run, spec, workers, resolved.source, checkpoint, mode, place.reference, place.search_path)
        display = Guarded(WithPrints(watch(RunStart(run, spec, workers)), run))
        try:
            outcome = run_locally(launch, display.handle, accept, signals)
        finally:
            display.handle(Round(is_last=True))
            display.close()
    if outcome.failure is not None:
        raise outcome.failure.error()
    if outcome.result["ending"] == signals.reason:  # before there was a worker to be stopped
        raise JobFailed(signals.failure(f"{signals.reason}; the run is as it was."))
    return run, outcome.result


LINES, PARQUET = (".jsonl", ".ndjson"), ".parquet"
PARTS = ".parts"
"""Beside the output: what is done of it, until all is."""


@dataclass(frozen=True)
class Predicted:
    """What was predicted by which state, and where it is; `earlier` rows were there from a run that was killed."""

    run: str
    step: int
    file: Path
    rows: int
    earlier: int


def predict_run(asked: Asked, data: str, output: Path, averaged: bool | None = None) -> Predicted:
    """Write what the task's predict() gives of a dataset, in the order of its samples. What was killed goes on where it
    was, if it was of the same checkpoint, data and code."""
    _refuse_output(output)
    if ":" not in data and data not in ("train", "validation", "test"):
        raise RequestError(f"there is no dataset {data}: name train, validation, test, or a function, file.py:function")
    parts, earlier = Path(f"{output.absolute()}{PARTS}"), 0

    def take_up(run: RunFolder, info: CheckpointInfo, now: Prepared) -> None:
        nonlocal earlier
        weights = info.manifest.weights_digest
        of: dict[str, Any] = {
            "run": run.name,
            "weights": weights,
            "averaged": averaged,
            "data": data,
            "code": now.facts.get(SOURCE),
        }
        of |= {"job": sorted((one.key, str(one.value)) for one in asked.overrides if one.key != "workers")}
        told, known = content_digest(json.dumps(of).encode()), parts / "of"
        if not known.exists() or known.read_text() != told:
            shutil.rmtree(parts, ignore_errors=True)
            parts.mkdir(parents=True)
            write_atomically(known, told)
        earlier = sum(file.read_text().count("\n") for file in parts.glob("*.rows"))

    mode = RunMode(evaluates_only=True, averaged=averaged, data=data, predict_to=str(parts))
    run, info, _, _ = look_at_checkpoint(asked, mode, take_up)
    temporary = temporary_of(output.absolute())
    rows = (_write_parquet if output.suffix == PARQUET else _write_lines)(parts, temporary)
    move_into_place(temporary, output.absolute())
    shutil.rmtree(parts, ignore_errors=True)
    return Predicted(run.name, info.cursor.step, output, rows, earlier)


def _refuse_output(output: Path) -> None:
    if output.suffix not in (*LINES, PARQUET):
        raise RequestError(f"{output}: predictions are written as .jsonl (JSON lines) or .parquet, by the suffix.")
    if not output.absolute().parent.is_dir():
        raise RequestError(f"{output}: there is no folder {output.parent}.")
    if output.suffix == PARQUET and find_spec("pyarrow") is None:
        raise RequestError(f"{output} needs the library pyarrow: {install_of('parquet')}. Or write .jsonl.")


def _write_lines(parts: Path, file: Path) -> int:
    from quorate.training.evaluation import rows_in

    count = 0
    with file.open("w") as lines:
        for row in chain.from_iterable(rows_in(parts, lambda _: None)):  # JSON has no NaN
            lines.write(f"{json.dumps(row)}\n")
            count += 1
    return count


def _write_parquet(parts: Path, file: Path) -> int:
    import pyarrow
    from pyarrow import parquet

    from quorate.training.evaluation import rows_in

    # First of all: a column may be empty in one batch and have its type in another.
    schemas: Any = (pyarrow.Table.from_pylist(rows).schema for rows in rows_in(parts))
    schema = pyarrow.unify_schemas(dict.fromkeys(schemas), promote_options="permissive")
    count = 0
    with parquet.ParquetWriter(file, schema) as writer:
        for rows in rows_in(parts):
            writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
            count += len(rows)
    return count
