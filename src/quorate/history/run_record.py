"""One run as its folder tells it: how it stands, how far it has come, and what came out.

And lists of them: all in a folder, those that a person asks for, in the order that a person asks for.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from quorate.checkpoint.listing import newest_manifest
from quorate.checkpoint.retention import BestEvaluation, Watched, best_of, better_of, is_number
from quorate.core.errors import QuorateError, RunError
from quorate.core.failure import Failure
from quorate.core.user_code import describe
from quorate.history.event_index import glance
from quorate.history.timeline import Timeline
from quorate.observe.events import GenerationFormed, RunBegan, RunFailed, failure_in
from quorate.observe.quantities import device_memory
from quorate.spec.resolved import glance_at_recorded
from quorate.storage.fencing import Holder
from quorate.storage.run_folder import RunFolder
from quorate.storage.run_notes import failed_submission, waits_to_begin

Read = TypeVar("Read")


class Attempts:
    """Reads one file after another of somebody's, whatever state they are in: `problems` are what cannot be read."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def __call__(self, read: Callable[[], Read], instead: Read) -> Read:
        try:
            return read()
        except QuorateError as error:
            self.problems.append(error.message)
            return instead


class Status(StrEnum):
    """How a run stands, the most pressing first."""

    RUNNING = "running"  # a launcher is at work on it
    SUBMITTED = "submitted"  # it waits for a cluster to start its launcher
    FAILED = "failed"  # it ended with a failure
    LOST = "lost"  # nobody is at work on it and nobody has written how it ended: killed with its launcher
    DAMAGED = "damaged"  # its files cannot be read
    INTERRUPTED = "interrupted"  # stopped by Ctrl-C, or at the step up to which this part was to train
    TERMINATED = "terminated"  # stopped by SIGTERM
    COMPLETE = "complete"


def decide_status(
    held: bool, result: dict[str, Any] | None, problems: tuple[str, ...], waits: bool = False, given_up: str = ""
) -> tuple[Status, str]:
    """How a run stands, and why where that is not plain. `problems` are what cannot be read of its files; it `waits`
    for a launcher, or is `given_up` before one took it up, with the result of an earlier part or without."""
    if held:
        return Status.RUNNING, "; ".join(problems)
    if problems:
        return Status.DAMAGED, "; ".join(problems)
    if waits or given_up:
        waiting = (Status.SUBMITTED, "Ray has not started its launcher yet; `quorate logs -f` waits for it")
        return waiting if waits else (Status.FAILED, given_up)
    if result is None:
        return Status.LOST, "it was killed together with its launcher, which could not write how it ended"
    said = result.get("status")
    if said in (Status.COMPLETE, Status.INTERRUPTED, Status.TERMINATED, Status.FAILED):
        return Status(said), ""
    return Status.DAMAGED, f"result.json says that it is {said!r}, which no run can be"


@dataclass(frozen=True)
class RunRecord:
    """What is known of a run; what could not be read, or is not known yet, is None or empty.

    `reason` says why it is lost or damaged, or failed before it began. `steps` is how many it has done. `wall_seconds`
    are those of its last part: a resumed run has several.
    """

    name: str
    path: Path
    status: Status
    reason: str
    created: datetime
    ended: datetime | None = None
    steps: int = 0
    total_steps: int | None = None
    ending: str = ""
    best: BestEvaluation | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    weights_digest: str = ""
    samples_per_second: float | None = None
    wall_seconds: float | None = None
    computed_by: str = ""
    audits: Mapping[str, Any] | None = None
    device_memory: str = ""
    failure: Failure | None = None
    task: str = ""
    lanes: int | None = None
    workers: int | None = None
    launcher: Holder | None = None

    @classmethod
    def read(cls, run: RunFolder, timeline: Timeline | None = None) -> "RunRecord":
        """From a run's folder, whatever state that is in; a timeline that was read already is not read again."""
        try:
            return cls._read(run, timeline)
        except Exception as error:  # whatever it is: one run that cannot be read must not hide the others
            reason = error.message if isinstance(error, QuorateError) else f"it cannot be read: {describe(error)}"
            try:
                created = run.created
            except Exception:  # its folder may not be looked into
                if not run.path.exists():  # it was removed meanwhile
                    raise
                created = datetime.fromtimestamp(0, UTC)
            return cls(run.name, run.path, Status.DAMAGED, reason, created)

    @classmethod
    def _read(cls, run: RunFolder, timeline: Timeline | None) -> "RunRecord":
        attempt = Attempts()
        told = timeline if timeline is not None else attempt(lambda: glance(run.events_file), Timeline())
        job = attempt(lambda: glance_at_recorded(run.job_file), dict[str, Any]())
        # In this order: a launcher writes the result before it lets go. One that takes the run up in between removes
        # the result of an earlier part, so that without one the holder is asked about once more.
        holder = attempt(run.holder, None)
        written = attempt(run.read_result, None)
        if holder is None and written is None:
            holder = attempt(run.holder, None)
        waits, given_up = attempt(lambda: (waits_to_begin(run), failed_submission(run)), (False, ""))
        status, reason = decide_status(holder is not None, written, tuple(attempt.problems), waits, given_up)
        result: dict[str, Any] = {} if holder or written is None else written
        return cls(
            name=run.name,
            path=run.path,
            status=status,
            reason=reason,
            created=run.created,
            ended=None if status is Status.RUNNING else moment(told.ended),
            steps=_whole(result.get("steps")) or told.position,
            # By its result where that is complete: what has told another number was to train further, and never began.
            total_steps=_whole(result.get("steps") if result.get("ending") == "complete" else None)
            or told.total_steps
            or _whole(job.get("steps")),
            ending=str(result.get("ending", "")),
            best=_best(run, result, told, Watched.by(job)),
            metrics=said if isinstance(said := result.get("final_metrics"), dict) and said else told.metrics,
            weights_digest=str(result.get("weights_digest") or ""),
            samples_per_second=_number(result.get("samples_per_second")),
            wall_seconds=_number(result.get("wall_seconds")),
            computed_by=str(result.get("computed_by", "")),
            audits=audits if isinstance(audits := result.get("audits"), Mapping) else None,
            device_memory=device_memory(result.get("device_memory")),
            failure=_failure(result, told),
            task=str(job.get("task", "")),
            lanes=_whole(job.get("lanes")),
            workers=_workers(told, job),
            launcher=holder,
        )

    def age(self, now: datetime) -> float:
        """Seconds since it was created."""
        return max(0.0, (now - self.created).total_seconds())

    @property
    def progress(self) -> str:
        """The steps done, and how many there are to be."""
        return f"{self.steps:,}" + ("" if self.total_steps is None else f"/{self.total_steps:,}")


def moment(time: float | None) -> datetime | None:
    """A time as an event tells it; none where it is none, or no time that there can be."""
    try:
        return None if time is None else datetime.fromtimestamp(time, UTC)
    except (OverflowError, ValueError, OSError):
        return None


def _best(run: RunFolder, result: dict[str, Any], told: Timeline, watched: Watched) -> BestEvaluation | None:
    """As the result says it; without one, the better of what was told and of what the newest checkpoint knows: a run
    that was fetched from another place has not told here all that it has evaluated."""
    if (said := _best_in(result.get("best"), watched)) is not None:
        return said
    newest = newest_manifest(run.checkpoints)
    return better_of([best_of(told.evaluations, watched), _best_in(newest and newest.best, watched)])


def _best_in(said: Any, watched: Watched) -> BestEvaluation | None:
    if isinstance(said, dict) and is_number(said.get("value")) and _whole(said.get("step")) is not None:
        return BestEvaluation(watched, float(said["value"]), said["step"])
    return None


def _failure(result: dict[str, Any], told: Timeline) -> Failure | None:
    """As the result says it; without one as the events do, unless the run has gone on since."""
    said = result.get("failure")
    if isinstance(said, dict):
        return failure_in(said)
    last = next((event for event in reversed(told.others) if isinstance(event, RunFailed | RunBegan)), None)
    return None if result or not isinstance(last, RunFailed) else last.failure


def _workers(told: Timeline, job: dict[str, Any]) -> int | None:
    """As many as formed the last generation, or as the job asks for."""
    formed = (event.members for event in reversed(told.of_kind(GenerationFormed)) if event.members is not None)
    members = next(formed, None)
    return _whole(job.get("workers")) if members is None else len(members)


def _whole(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _number(value: Any) -> float | None:
    return value if is_number(value) else None


class Order(StrEnum):
    """What a list of runs is sorted by."""

    AGE = "age"  # the newest first
    NAME = "name"
    STATUS = "status"  # the most pressing first
    STEPS = "steps"  # the longest first
    METRIC = "metric"  # the best first


@dataclass(frozen=True)
class RunQuery:
    """Which runs, in which order, and how many of them at most; by default all, the newest first."""

    statuses: tuple[Status, ...] = ()
    task: str = ""
    name: str = ""
    order: Order = Order.AGE
    reverse: bool = False
    limit: int | None = None


@dataclass(frozen=True)
class Listing:
    """The runs in a folder, and those of them that fit a query, in its order."""

    folder: Path
    query: RunQuery
    records: tuple[RunRecord, ...]
    fitting: tuple[RunRecord, ...]

    @classmethod
    def read(cls, folder: Path, query: RunQuery) -> "Listing":
        """From a folder of run folders; one that is not there has no runs."""
        records = read_runs(folder)
        return cls(folder, query, records, chosen(records, query))

    @property
    def shown(self) -> tuple[RunRecord, ...]:
        """Those that fit, as many as were asked for."""
        return self.fitting[: self.query.limit]


def read_runs(folder: Path) -> tuple[RunRecord, ...]:
    """All runs in a folder, oldest first. One that is removed meanwhile is left out, one that is broken is not."""
    records = []
    for run in RunFolder.all_in(folder):
        with contextlib.suppress(RunError):
            record = RunRecord.read(run)
            if run.path.is_dir():
                records.append(record)
    return tuple(records)


def chosen(records: Sequence[RunRecord], query: RunQuery) -> tuple[RunRecord, ...]:
    """Those that fit a query, in its order, without its limit."""
    fitting = sorted((record for record in records if _fits(record, query)), key=_newest_first)
    # What has no metric stands last in either direction: it is neither good nor bad.
    last = [each for each in fitting if query.order is Order.METRIC and each.best is None]
    placed = [each for each in fitting if query.order is not Order.METRIC or each.best is not None]
    return (*sorted(placed, key=_KEYS[query.order], reverse=query.reverse), *last)


def short_task(reference: str) -> str:
    """A task without the folder that its file is in."""
    place, colon, class_name = reference.rpartition(":")
    return f"{place.rpartition('/')[2]}{colon}{class_name}"


def has_task(reference: str, wanted: str) -> bool:
    """Whether a task is meant by its class, its file or module, both, or the end of a path to it."""
    place, _, class_name = reference.rpartition(":")
    names = (reference, place, class_name, place.removesuffix(".py"))
    return any(name == wanted or name.endswith((f"/{wanted}", f".{wanted}")) for name in names)


def _fits(record: RunRecord, query: RunQuery) -> bool:
    return (
        (not query.statuses or record.status in query.statuses)
        and (not query.task or has_task(record.task, query.task))
        and record.name.startswith(query.name)
    )


def _newest_first(record: RunRecord) -> tuple[float, str]:
    return -record.created.timestamp(), record.name


_KEYS: dict[Order, Callable[[RunRecord], Any]] = {
    Order.AGE: _newest_first,
    Order.NAME: lambda record: record.name,
    Order.STATUS: lambda record: list(Status).index(record.status),
    Order.STEPS: lambda record: -record.steps,
    Order.METRIC: lambda record: (record.best.watched.metric, record.best.rank) if record.best else (),
}
