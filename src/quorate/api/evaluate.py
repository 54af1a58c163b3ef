"""What is computed beside a run, in a folder that is thrown away: `quorate.evaluate`, `quorate predict`, and the replay
of one step of two runs."""

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
    recorded_job,
    refuse_lost_checkpoints,
)
from quorate.api.result import refuse_without_average
from quorate.api.run_part import run_locally
from quorate.api.session import refuse_in_worker
from quorate.api.tasks import TaskLocation, find_task, is_other_code, refuse_other_code, refuse_others_task
from quorate.api.train import passing_on_signals
from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.selection import LAST
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.digests import content_digest
from quorate.core.errors import CheckpointError, RequestError, RunError
from quorate.core.failure import JobFailed
from quorate.core.installation import install_of
from quorate.core.machine import usable_cores
from quorate.core.runs_folder import runs_folder
from quorate.engines.engine import SOURCE, Prepared
from quorate.observe.events import RunBegan, StepCompleted
from quorate.observe.jsonl import EventTail
from quorate.observe.sinks import Guarded, Round
from quorate.spec.changes import changes
from quorate.spec.device import workers_here
from quorate.spec.job import JobSpec
from quorate.spec.keys import Mark
from quorate.spec.options import LocalSpec
from quorate.spec.override import Override, is_asked
from quorate.spec.resolved import ResolvedJob
from quorate.storage.atomic import move_into_place, temporary_of, write_atomically
from quorate.storage.run_folder import RunFolder, why_untrusted
from quorate.supervisor.signals import listening_to_signals
from quorate.supervisor.supervisor import Launch
from quorate.task.run_mode import RunMode

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


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that is not the same in two states; `largest` is None where their shapes or types differ."""

    name: str
    shape: tuple[int, ...]
    elements: int
    differing: int
    largest: float | None


@dataclass(frozen=True)
class Replay:
    """What a replay found.

    `moment` is "before" where the states differ already when the step begins, "after" where they do once it is done,
    and None where the replay has ended with equal states. `unfaithful` names the runs whose replay does not give
    what their events say: they ran with another processor, library or data than there is here.
    """

    step: int
    moment: str | None
    tensors: tuple[TensorDifference, ...]
    unfaithful: tuple[str, ...]


@dataclass(frozen=True)
class _Replayed:
    before: dict[str, Any]
    after: dict[str, Any]
    reported: dict[str, float | None]


def replay(
    runs: tuple[RunFolder, RunFolder], step: int, reported: tuple[Mapping[str, Any], Mapping[str, Any]]
) -> Replay:
    """Replay a step of two runs; `reported` is what the events of each say of it: loss and gradient norm."""
    with scratch_folder() as scratch:
        left, right = (_replayed(run, step, scratch / str(side)) for side, run in enumerate(runs))
        unfaithful = tuple(
            run.name
            for run, done, expected in zip(runs, (left, right), reported, strict=True)
            if any(done.reported.get(name) != value for name, value in expected.items())
        )
        for moment, pair in (("before", (left.before, right.before)), ("after", (left.after, right.after))):
            differences = tuple(_differences(*pair))
            if differences:
                return Replay(step, moment, differences, unfaithful)
    return Replay(step, None, (), unfaithful)


def refuse_unrepeatable(run: RunFolder, spec: JobSpec, what: str) -> None:
    """Refuse a run whose bits do not come again: it cannot be `what` is said."""
    if not spec.strategy.is_synchronous:
        mode = spec.model_dump()["strategy"]["mode"]
        raise RunError(
            f"run {run.name} cannot be {what}: with strategy.mode: {mode} its weights depend on who was when at "
            f"work, and that does not come again. Only synchronous runs are {what}; `quorate show RUN --ledger` says "
            "what is promised of the others."
        )
    if not spec.strategy.fixes_bits:
        raise RunError(
            f"run {run.name} cannot be {what}: with strategy: {spec.strategy.kind} its last bits depend on "
            "how many workers there were at each step."
        )


def _replayed(run: RunFolder, step: int, scratch: Path) -> _Replayed:
    resolved = recorded_job(run)
    refuse_unrepeatable(run, resolved.spec, "replayed")
    place = find_task(run, resolved.spec.task)

    def refuse(now: Prepared) -> None:
        try:
            refuse_other_code(run, recorded_environment(run, info), now, "Undo the change, and try again.")
        except RunError as error:
            raise RunError(f"run {run.name} cannot be replayed: {error.message}") from None

    info = _checkpoint_before(run, step)
    checkpoint = None if info is None else hold_checkpoint(run, info, scratch)
    mode, micro_batches = RunMode(replayed_step=step), run.read_micro_batches()
    done, _ = run_in_scratch(scratch, resolved, mode, checkpoint, refuse, place, micro_batches)
    folder = CheckpointFolder.at(done.checkpoints)
    states = {saved.cursor.step: folder.load(saved).state["replica"] for saved in folder.list()}
    events = EventTail(done.events_file).read_new()
    reported = next((event for event in events if isinstance(event, StepCompleted) and event.step == step), None)
    if reported is None or not {step - 1, step} <= states.keys():
        raise RunError(f"run {run.name} cannot be replayed: trained again here, it ends before step {step}")
    return _Replayed(states[step - 1], states[step], reported.by_optimizer("loss", "gradient_norm"))


def _checkpoint_before(run: RunFolder, step: int) -> CheckpointInfo | None:
    """The newest whole one before a step; without any, the replay begins where the job does."""
    folder = CheckpointFolder.at(run.checkpoints)
    for info in reversed(folder.list()):
        if info.cursor.step < step:
            with contextlib.suppress(CheckpointError):
                folder.verify(info)
                return info
    begin = 0
    with contextlib.suppress(RunError):
        begun = next((event for event in EventTail(run.events_file) if isinstance(event, RunBegan)), None)
        begin = 0 if begun is None else begun.from_step or 0
    if begin > 0:
        raise RunError(
            f"run {run.name} cannot be replayed: it is a branch that began at step {begin} from a checkpoint of "
            f"another run, and it has none of its own before step {step}. Keep more of them with `checkpoint.every` "
            "and `checkpoint.keep`"
        )
    return None


def _differences(left: dict[str, Any], right: dict[str, Any]) -> Iterator[TensorDifference]:
    import torch

    from quorate.replica.device import same_bits

    first, second = dict(_tensors(left)), dict(_tensors(right))
    for name in {**first, **second}:
        tensor = first[name] if name in first else second[name]
        differing, largest = tensor.numel(), None
        if name in first and name in second:
            one, other = first[name], second[name]
            if same_bits(one, other):
                continue
            if one.shape == other.shape and one.dtype == other.dtype:
                raw = [each.contiguous().reshape(-1, 1).view(torch.uint8) for each in (one, other)]
                differing = int((raw[0] != raw[1]).any(dim=1).sum())
                largest = float((one.double() - other.double()).abs().max())
        yield TensorDifference(name, tuple(tensor.shape), tensor.numel(), differing, largest)


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors of a replica's state, the model's under their own names."""
    import torch

    if isinstance(value, torch.Tensor):
        yield path.removeprefix("tensors."), value
    elif isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from _tensors(inner, f"{path}.{key}" if path else str(key))
