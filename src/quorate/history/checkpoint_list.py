"""The checkpoints of a run, as its folder lists them: what each is, and why it is kept.

Nothing of theirs is read but the manifest.
"""

import contextlib
from collections.abc import Iterable
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
from quorate.history.event_index import glance
from quorate.history.run_record import RunRecord
from quorate.history.timeline import Timeline
from quorate.observe.events import CheckpointSaved
from quorate.spec.job import CheckpointSpec, JobSpec
from quorate.spec.load import load_recorded
from quorate.storage.run_folder import RunFolder


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
        best, saved = RunRecord.read(run, told).best, told.of_kind(CheckpointSaved)
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
