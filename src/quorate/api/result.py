"""What a run leaves behind, or has so far."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quorate.api.job import Code
from quorate.api.recorded_run import (
    chosen_checkpoint,
    recorded_environment,
    recorded_job,
    refuse_lost_checkpoints,
    warn_of_damaged_result,
)
from quorate.api.tasks import find_task, refuse_others_task, warn_of_other_code
from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.selection import LAST, own_among, why_foreign
from quorate.checkpoint.store import CheckpointFolder, Loaded
from quorate.core.errors import CheckpointError, JobError, QuorateError, RequestError, RunError
from quorate.core.failure import Failure
from quorate.core.regular_file import opened_regular
from quorate.core.runs_folder import runs_folder
from quorate.observe.console import html_table
from quorate.observe.events import read_event
from quorate.observe.quantities import measure
from quorate.observe.screen import summary_rows
from quorate.spec.job import JobSpec, TaskReference
from quorate.spec.load import load_recorded
from quorate.storage.run_folder import RunFolder, why_untrusted
from quorate.storage.run_notes import failed_submission, those_that_wait, waits_to_begin

EXIT_CODES = {"failed": 1, "lost": 1, "interrupted": 130, "terminated": 143}
SHORT_DIGEST = 12


class History(list[dict[str, float]]):
    """A mapping for each step, by the names that numbers have in trackers."""

    def to_dataframe(self) -> Any:
        """A row for each step, as pandas has it; NaN where a step has no such number."""
        pandas = pandas_here()
        return pandas.DataFrame(self).set_index("step") if self else pandas.DataFrame()


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a run: how it ended, or its state so far.

    ::

        result = quorate.train(job)                    # or quorate.open_run("last")
        result.metrics["accuracy"]
        model = result.load_model("best")

    `status` is complete, interrupted, terminated or failed. A run from `open_run` can also be submitted, running, or
    lost: killed together with its launcher. `metrics` are those of the last evaluation, and `weights_digest` is that of
    the final model. If the run is not complete, `steps`, `metrics` and `weights_digest` are those of its newest
    checkpoint. `fields` has everything that `quorate train --json` prints.
    """

    run: str
    folder: Path
    status: str
    steps: int
    metrics: dict[str, float]
    weights_digest: str
    samples_per_second: float
    wall_seconds: float
    fields: dict[str, Any] = field(default_factory=dict)
    task_type: Code | None = field(default=None, compare=False)
    untrusted: str = field(default="", compare=False)

    @classmethod
    def of(cls, run: RunFolder, fields: dict[str, Any]) -> "Result":
        """From the content of `result.json`, or what is known of it."""
        metrics: dict[str, Any] = fields.get("final_metrics") or {}
        return cls(
            run=run.name,
            folder=run.path,
            status=fields["status"],
            steps=fields.get("steps", 0),
            metrics={name: math.nan if value is None else value for name, value in metrics.items()},
            weights_digest=fields.get("weights_digest", ""),
            samples_per_second=fields.get("samples_per_second") or 0.0,
            wall_seconds=fields.get("wall_seconds") or 0.0,
            fields=fields,
        )

    @property
    def exit_code(self) -> int:
        """The exit code of the command line for this status."""
        return EXIT_CODES.get(self.status, 0)

    @property
    def recoveries(self) -> list[dict[str, Any]]:
        """The recoveries since the run was last started or resumed, in order: a mapping for each lost worker, with
        `step`, `cause`, `worker`, `detect_s`, `reform_s`, `copy_s`, `first_step_s`, `refill_s` and `steps_lost`."""
        return list(self.fields.get("recoveries") or ())

    @property
    def history(self) -> History:
        """The metrics of all steps and evaluations so far, a mapping for each step, with the names that trackers use:
        ``step``, ``train/loss``, ``train/learning_rate``, ``train/epoch``, what the task logged (``train/NAME``) and
        validation metrics (``val/NAME``). ``result.history.to_dataframe()`` returns a pandas DataFrame."""
        return history_of(RunFolder(self.folder))

    @property
    def error(self) -> str | None:
        """The message of the failure that ended the run; None if it has not failed."""
        return (self.fields.get("failure") or {}).get("message")

    def load_model(
        self,
        checkpoint: str | int = LAST,
        *,
        averaged: bool | None = None,
        map_location: Any = None,
        task: Any = None,
        trust_job: bool = False,
    ) -> Any:
        """Load the model of a checkpoint: ``"last"``, ``"best"`` (by `evaluate.metric`) or that of a step.

        If the job evaluates averaged weights (`average.evaluate`), the model has these, so that ``"best"`` is the model
        that was evaluated; `averaged` (True or False) chooses otherwise.

        The task builds the model, which is in the mode in which `model()` leaves it: call `model.eval()` before
        predicting. It is on the CPU, or where `map_location` says: a device, or anything else that `Module.to` accepts.
        The caller's random generators are not changed.

        If the task has moved, it is looked for relative to the run; if it is gone, the copy of its source in the run
        folder is used. `task` (a class, ``"file.py:Class"`` or ``"package.module:Class"``) names another.
        `trust_job`: load the task that the job names, also if the run was opened by its path and others can write there
        (`untrusted` says why).
        """
        named: Any = self.task_type if task is None else task
        run = RunFolder(self.folder)
        if named is None and not trust_job:
            refuse_others_task(self.untrusted, run)
        model = model_of(run, checkpoint, named, averaged=averaged).model
        return model if map_location is None else model.to(map_location)

    def stop(self, *, now: bool = False, timeout: float = 300.0) -> "Result":
        """Stop a running job as Ctrl-C does: it completes its step, saves a checkpoint and ends. Waits for the end and
        returns the new result; `now` ends the job without saving.

        ::

            quorate.open_run("last").stop()
        """
        from quorate.api import control

        control.stop(RunFolder(self.folder), now=now, patience=timeout)
        return replace(open_run(self.folder), untrusted=self.untrusted)

    def __repr__(self) -> str:
        metrics = [f"{name} {measure(value)}" for name, value in self.metrics.items()]
        weights = [f"weights {self.weights_digest[:SHORT_DIGEST]}…"] if self.weights_digest else []
        return f"<Result {self.run}: {', '.join([self.status, f'{self.steps:,} steps', *metrics, *weights])}>"

    def _repr_html_(self) -> str:
        return html_table([("run", self.run), ("status", self.status), *summary_rows(self.fields)])


def open_run(run: str | Path = LAST, runs: str | Path | None = None) -> Result:
    """Open an existing run by its name, a unique prefix of it, its path, or ``"last"``. It may still be running.

    Names are looked for in the folder `runs`, by default that of the variable QUORATE_RUNS, or else `runs` in the
    working folder or in one above it.

    ::

        quorate.open_run("digits-0003").load_model("best")
    """
    looked_in = runs_folder(runs)
    folder = RunFolder(RunFolder.find(looked_in, str(run)).path.absolute())
    untrusted = why_untrusted(looked_in, str(run), folder.path)
    known = {"run": folder.name, "folder": str(folder.path), **_so_far(folder)}
    warn_of_damaged_result(folder)
    result = folder.whole_result()
    if result is None:
        # It may have ended between the two looks.
        result = {"status": "running"} if folder.holder() is not None else folder.whole_result()
    if folder.holder() is None:
        if waiting := those_that_wait([folder]):
            from quorate.engines.ray.jobs import ask_about_submitted

            ask_about_submitted(waiting)
        if waits_to_begin(folder):
            result = {**(result or {}), "status": "submitted"}
        elif why := failed_submission(folder):
            result = {**(result or {}), "status": "failed", "failure": Failure(JobError.__name__, why).to_dict()}
    return replace(Result.of(folder, known | (result or {"status": "lost"})), untrusted=untrusted)


def refuse_without_average(run: str, spec: JobSpec) -> None:
    """Refuse to give the averages of a run that keeps none."""
    if spec.average is None:
        raise RunError(
            f"run {run} keeps no average of its weights: its job has no `average`. Leave `averaged` out, or train with "
            "average: {decay: 0.999}."
        )


@dataclass(frozen=True)
class LoadedModel:
    """A model, the checkpoint that it is of and the task that has built it. `averaged`: whether its parameters are
    their averages; None where the job keeps none."""

    checkpoint: CheckpointInfo
    model: Any
    averaged: bool | None
    task: Any
    spec: JobSpec


def model_of(
    run: RunFolder, checkpoint: str | int, task: Code | str | None = None, *, averaged: bool | None = None
) -> LoadedModel:
    """The model of the checkpoint that is meant, as the task builds it: that of the run, or another.

    `averaged`: with the averages of the parameters or the parameters themselves; None as the job evaluates.
    """
    from quorate.data.streams import preserved_generators
    from quorate.own_loop.loop import own_loop_of
    from quorate.replica.replica import Replica
    from quorate.task.task import configure

    spec = recorded_job(run).spec
    if averaged:
        refuse_without_average(run.name, spec)
    refuse_lost_checkpoints(run, spec, "load")
    info, saved = _read(run, spec, checkpoint)
    with preserved_generators(), contextlib.ExitStack() as stack:
        if isinstance(task, Code):
            task_type = task if isinstance(task, type) else own_loop_of(task)
        else:
            asked = None if task is None else str(TaskReference.parse(task).within(Path.cwd()))
            place = find_task(run, spec.task, asked)
            warn_of_other_code(run, recorded_environment(run, info), place)
            task_type = stack.enter_context(place.loaded(spec.seed))
        built_by = configure(task_type, spec.params, str(run.job_file), spec.seed, spec)
        replica = Replica(built_by, spec)
        replica.load(saved.state["replica"])
        if replica.average is None or spec.average is None:
            return LoadedModel(info, replica.model, None, built_by, spec)
        takes_over = spec.average.evaluate if averaged is None else averaged
        if takes_over:
            replica.average.take_over()
        return LoadedModel(info, replica.model, takes_over, built_by, spec)


def _read(run: RunFolder, spec: JobSpec, checkpoint: str | int) -> tuple[CheckpointInfo, Loaded]:
    """The checkpoint that is meant, and what it holds. A job that trains may remove it meanwhile: then it is the one
    that is meant by now."""
    while True:
        folder, info = chosen_checkpoint(run, spec, checkpoint, spec.checkpoint)
        try:
            return info, folder.load(info)
        except CheckpointError:
            if any(one.path == info.path for one in folder.list()):
                raise


def _so_far(run: RunFolder) -> dict[str, Any]:
    """What the newest checkpoint tells, for a run that has not told how it ended."""
    checkpoints: Sequence[CheckpointInfo] = CheckpointFolder.at(run.checkpoints).list()
    with contextlib.suppress(QuorateError):  # without its job nobody knows which are of another
        spec = load_recorded(run.job_file, {}, []).spec
        checkpoints = own_among(checkpoints, lambda info: why_foreign(info, spec))
    if not checkpoints:
        return {"steps": 0, "final_metrics": {}, "weights_digest": ""}
    manifest = checkpoints[-1].manifest
    return {"steps": manifest.step, "final_metrics": manifest.metrics, "weights_digest": manifest.weights_digest}


def pandas_here() -> Any:
    """The library pandas, for whoever asks for a table; nothing else needs it."""
    try:
        import pandas
    except ImportError:
        raise RequestError(
            "to_dataframe needs the library pandas, which is not installed: pip install pandas"
        ) from None
    return pandas


def history_of(run: RunFolder) -> History:
    """In the order of steps; a step that was redone is there once. Lines that are no events are passed over."""
    # Only here: whoever trains and does not look back need not import it.
    from quorate.history.curves import TRAIN, VALIDATION, Curves

    shown = (f"{TRAIN}/", f"{VALIDATION}/")
    curves, records = Curves(), dict[int, dict[str, float]]()
    try:
        with opened_regular(run.events_file) as file:
            for line in file:
                try:
                    points = curves.points(read_event(line))
                except ValueError:
                    continue  # the last line of a run that is running, or was killed, may be half of one
                for point in points:
                    if point.name.startswith(shown):
                        records.setdefault(point.step, {"step": point.step})[point.name] = point.value
    except FileNotFoundError:
        return History()
    except OSError as error:
        raise RunError(f"cannot read {run.events_file}: {error.strerror or error}") from error
    return History(records[step] for step in sorted(records))
