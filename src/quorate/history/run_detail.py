"""Everything about one run: with its checkpoints, as its folder lists them, and what to type next about it."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quorate.checkpoint.listing import CheckpointInfo, Skipped, cursor_of, shown_by, survey
from quorate.checkpoint.manifest import Part
from quorate.checkpoint.retention import Reason, Retention, reasons
from quorate.checkpoint.selection import why_foreign
from quorate.core.errors import CheckpointError, QuorateError
from quorate.core.generation import Phase
from quorate.core.machine import usable_cores
from quorate.core.masking import shown_value
from quorate.core.task_source import TaskSource
from quorate.core.timing import Timing
from quorate.history.event_index import glance, read_timeline
from quorate.history.identity import Identity
from quorate.history.run_record import Attempts, RunRecord, Status
from quorate.history.step_rows import StepRows
from quorate.history.timeline import Timeline
from quorate.observe import events
from quorate.observe.notices import EARLY_STOP
from quorate.observe.quantities import plural
from quorate.observe.recoveries import brief
from quorate.observe.waiting import advice_on_waiting
from quorate.spec.job import CheckpointSpec, JobSpec, mark_of
from quorate.spec.keys import Mark
from quorate.spec.load import load_recorded
from quorate.spec.override import DEFAULT
from quorate.spec.resolved import ResolvedJob
from quorate.storage.run_folder import RunFolder
from quorate.storage.task_files import read_source


@dataclass(frozen=True)
class CheckpointRecord:
    """One checkpoint; `problem` says why it cannot be used, as far as that shows without reading it through. In the
    list of a run's, `because` says why it is kept; it is empty for one that goes with the next save."""

    name: str
    problem: str = ""
    step: int | None = None
    evaluated: bool = False
    bytes: int = 0
    created: str = ""
    weights_digest: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    encrypted: bool = False
    best: int | None = None
    foreign: str = ""
    because: tuple[Reason, ...] = ()

    @classmethod
    def of(cls, found: CheckpointInfo | Skipped, job: JobSpec | None = None) -> "CheckpointRecord":
        """From what the survey of a folder has found; with the run's job, `foreign` says why it is none of its own."""
        if isinstance(found, Skipped):
            return cls(found.path.name, problem=found.reason)
        manifest = found.manifest
        return cls(
            name=found.path.name,
            problem=next(filter(None, (_problem(found.path, part) for part in manifest.parts)), ""),
            step=manifest.step,
            evaluated=found.cursor.phase is Phase.EVALUATED,
            bytes=found.bytes,
            created=manifest.created,
            weights_digest=manifest.weights_digest,
            environment={name: str(value) for name, value in manifest.environment.items()},
            # Of one that was not evaluated itself they are those of an earlier step.
            metrics=manifest.metrics if found.cursor.phase is Phase.EVALUATED else {},
            encrypted=manifest.encryption is not None,
            best=found.best,
            foreign="" if job is None else why_foreign(found, job),
        )

    @property
    def named_step(self) -> int:
        """As its name says: that of a damaged one is known by nothing else."""
        cursor = cursor_of(self.name)
        return cursor.step if cursor else 0

    def age(self, now: datetime) -> float | None:
        """Seconds since it was saved, if that is known."""
        try:
            return max(0.0, (now - datetime.fromisoformat(self.created).astimezone(UTC)).total_seconds())
        except ValueError:
            return None


@dataclass(frozen=True)
class CheckpointList:
    """All checkpoints of a run, oldest first."""

    run: str
    folder: Path
    checkpoints: tuple[CheckpointRecord, ...]

    @classmethod
    def read(cls, run: RunFolder) -> "CheckpointList":
        """From a run's folder: no part is read through, so damage inside of one does not show. Raises `CheckpointError`
        where they cannot be listed."""
        job, rules = None, CheckpointSpec()  # the usual ones where the job cannot be read
        with contextlib.suppress(QuorateError):
            job = load_recorded(run.job_file, {}, []).spec
            rules = job.checkpoint
        found = _records_in(run.checkpoints, job)
        records = {cursor: each for each in found if (cursor := cursor_of(each.name))}
        told = Timeline()
        with contextlib.suppress(QuorateError):
            told = glance(run.events_file)
        best, saved = RunRecord.read(run, told).best, told.of_kind(events.CheckpointSaved)
        whole = max((cursor for cursor, each in records.items() if not each.problem), default=None)
        # Retention counts those with a sound manifest only.
        listed = [cursor for cursor, each in records.items() if each.step is not None]
        why = reasons(
            listed,
            Retention(rules.keep, rules.keep_every, saved[-1].audited if saved else None),
            None if best is None else best.step,
            whole,
            {cursor: each.best for cursor, each in records.items()},
        )
        kept = tuple(replace(each, because=why.get(cursor, ())) for cursor, each in records.items())
        return cls(run.name, run.path, kept)


def read_checkpoints(folder: Path, job: JobSpec | None = None) -> tuple[CheckpointRecord, ...]:
    """All checkpoints in a folder, oldest first; none where it cannot be listed."""
    try:
        return _records_in(folder, job)
    except CheckpointError:
        return ()


def _records_in(folder: Path, job: JobSpec | None) -> tuple[CheckpointRecord, ...]:
    # A job that runs removes old ones at any moment: what is gone by now was not damaged.
    return tuple(CheckpointRecord.of(each, job) for each in survey(folder) if each.path.exists())


def nearest_saved(step: int, checkpoints: Iterable[CheckpointRecord]) -> int | None:
    """The step itself if a usable checkpoint holds its weights, else the nearest such, the earlier of two."""
    saved = {each.step for each in checkpoints if each.step is not None and not each.problem}
    return min(saved, key=lambda other: (abs(other - step), other), default=None)


def _problem(folder: Path, part: Part) -> str:
    if not (folder / part.file).exists() and shown_by(folder.parent) is not None:
        return ""  # nobody has read it here
    try:
        size = (folder / part.file).stat().st_size
    except OSError as error:
        return f"{part.file} cannot be read: {error.strerror}"
    return "" if size == part.bytes else f"{part.file} has {size:,} bytes and the manifest says {part.bytes:,}"


MEMBERS_SHOWN = 16
"""Workers of a generation that are named; `--json` has all."""


@dataclass(frozen=True)
class RunDetail:
    """A run with its job, its events, its checkpoints, and what its bits depend on.

    `job` is None where the recorded job cannot be read by this version. `problems` are what could not be read, beside
    what the record says already.
    `address` is where the coordinator of a run that is under way listens, for its owner.
    """

    record: RunRecord
    timeline: Timeline
    job: ResolvedJob | None
    environment: dict[str, str]
    checkpoints: tuple[CheckpointRecord, ...]
    address: str | None
    problems: tuple[str, ...]
    source: TaskSource | None = None
    identity: Identity | None = None

    @classmethod
    def read(cls, run: RunFolder, as_rows: bool = False) -> "RunDetail":
        """From a run's folder; `as_rows` as in `read_timeline`."""
        attempt, files = Attempts(), (run.events_file, run.job_file, run.environment_file)
        timeline = attempt(lambda: read_timeline(run.events_file, as_rows), None)
        job = attempt(lambda: load_recorded(run.job_file, {}, []), None)
        environment = attempt(run.read_environment, None) or {}
        checkpoints = read_checkpoints(run.checkpoints)
        # What only the workers can know, such as the canary and the dataset's fingerprint, stands in the checkpoints.
        from_workers = next((each.environment for each in reversed(checkpoints) if each.environment), {})
        kept = read_source(run.path)
        record = RunRecord.read(run, timeline)
        return cls(
            record=record,
            timeline=timeline or Timeline(rows=StepRows() if as_rows else None),
            job=job,
            environment=from_workers | {name: str(value) for name, value in environment.items()},
            checkpoints=checkpoints,
            address=run.read_address(),
            problems=tuple(
                problem
                for problem in attempt.problems
                if not any(str(file) in problem and str(file) in record.reason for file in files)
            ),
            source=None if kept is None else kept.source,
            identity=Identity.of_run(run),
        )

    @property
    def timing(self) -> Timing | None:
        return None if self.job is None else Timing(self.job.spec.failure_timeout)

    @property
    def advice_on_waiting(self) -> str | None:
        """Which knobs may shorten the waiting for data; None where nothing is to be gained, or the job is not known."""
        if self.job is None or not self.timeline.waiting.is_worth_telling:
            return None
        begun = self.timeline.of_kind(events.RunBegan)
        data = begun[-1].data if begun else None
        return advice_on_waiting(self.job.spec, data, self.record.workers, usable_cores())


@dataclass(frozen=True)
class JobValue:
    """A key (dotted) with its value, where that was given, and whether it changes the bits."""

    key: str
    value: Any
    origin: str
    mark: Mark

    @property
    def is_default(self) -> bool:
        return self.origin == DEFAULT


def job_values(job: ResolvedJob) -> tuple[JobValue, ...]:
    """Every value of a job, in the order of the job file's keys; what is secret is masked."""
    return tuple(
        JobValue(key, shown_value(key, value), job.origins.get(key, DEFAULT), mark_of(key))
        for key, value in _leaves("", job.spec.model_dump())
    )


@dataclass(frozen=True)
class Advice:
    """A command, if there is one to type, and what it is good for."""

    command: str | None
    purpose: str


def advise(
    record: RunRecord, spec: JobSpec | None, checkpoints: Sequence[CheckpointRecord], reference: str
) -> Advice | None:
    """What to type next; `reference` names the run on a command line. None where nothing is known to help."""
    resume = f"quorate resume {reference}"
    under_way = {
        Status.SUBMITTED: Advice(f"quorate logs -f {reference}", "shows what it logs, once it has begun"),
        Status.RUNNING: Advice(f"quorate stop {reference}", "stops it cleanly and leaves a checkpoint"),
    }
    if record.status in under_way:
        return under_way[record.status]
    if record.status is Status.DAMAGED:
        return None
    if record.status is Status.COMPLETE:
        return _about_complete(record, spec, resume)
    newest = next((each for each in reversed(checkpoints) if not each.problem), None)
    if newest is None:
        return Advice(
            None,
            "nothing was saved to resume from: start again with quorate train; checkpoint.every saves on the way",
        )
    if record.failure is not None and record.failure.is_repeatable:
        # A changed task is another job, which a run does not turn into.
        return Advice(f"{resume} --branch", f"once it is fixed, resumes from step {newest.step} in a new run")
    return Advice(resume, f"resumes from step {newest.step}")


def _about_complete(record: RunRecord, spec: JobSpec | None, resume: str) -> Advice | None:
    if record.ending == EARLY_STOP:
        return Advice(f"{resume} --branch --set early_stop=null", "trains on without early_stop, in a new run")
    if spec is None or (spec.schedule is not None and spec.schedule.depends_on_length):
        return None  # its rate has come to its end, and would leap
    longer = f"--steps {2 * spec.steps}" if spec.steps else f"--epochs {2 * (spec.epochs or 1)}"
    return Advice(f"{resume} {longer}", "trains twice as long")


def _leaves(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value


def said_of(event: object) -> str:
    """What happened, in words; nothing for what is no news."""
    said = ""
    match event:
        case events.RunBegan():
            total = f" of {event.total_steps:,}" if event.total_steps else ""
            said = f"training begins after step {event.from_step or 0:,}{total}"
        case events.GenerationFormed():
            members = event.computing
            hosts = [f"worker {each.worker} {_lanes(each.lanes)}" for each in members[:MEMBERS_SHOWN]]
            hosts += [plural(more, "more worker")] if (more := len(members) - len(hosts)) > 0 else []
            beside = f", {plural(len(event.servers), 'server')}" if event.servers else ""
            beside = f" ({event.mesh})" if event.mesh else beside
            beside += f" from step {event.from_step:,}" if event.from_step else ""
            said = f"generation {event.generation}, {plural(len(members), 'worker')}{beside}: "
            said += "; ".join(hosts) or "nobody"
        case events.WorkerLost():
            said = brief(event.message or "a worker is lost")
        case events.Resized():
            said = f"asked to continue with {event.said}"
        case events.CoordinatorReplaced():
            said = f"another coordinator took over; {event.present} workers came back to it"
        case events.RunStopped():
            said = f"stopped: {event.reason or ''}"
        case events.RunFailed():
            said = f"failed: {event.failure.message}"
    return said


def _lanes(lanes: Sequence[int]) -> str:
    """A worker hosts lanes that follow each other."""
    if not lanes:
        return "no lane"
    return f"lane {lanes[0]}" if len(lanes) == 1 else f"lanes {lanes[0]}-{lanes[-1]}"
