"""The checkpoints of a run, as its folder lists them: nothing of theirs is read but the manifest."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quorate.checkpoint.listing import CheckpointInfo, Skipped, survey
from quorate.checkpoint.manifest import Part
from quorate.checkpoint.selection import why_foreign
from quorate.core.cursor import Phase
from quorate.core.errors import CheckpointError
from quorate.spec.job import JobSpec


@dataclass(frozen=True)
class CheckpointRecord:
    """One checkpoint; `problem` says why it cannot be used, as far as that shows without reading it through."""

    name: str
    problem: str = ""
    step: int | None = None
    evaluated: bool = False
    bytes: int = 0
    created: str = ""
    weights_digest: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    metrics: dict[str, Any] = field(default_factory=dict)
    encrypted: bool = False
    best: int | None = None
    foreign: str = ""

    @classmethod
    def of(cls, found: CheckpointInfo | Skipped, job: JobSpec | None = None) -> "CheckpointRecord":
        """From what the survey of a folder has found; with the run's job, `foreign` says why it is none of its own."""
        if isinstance(found, Skipped):
            return cls(found.path.name, problem=found.reason.removeprefix(f"checkpoint {found.path}: "))
        manifest = found.manifest
        return cls(
            name=found.path.name,
            problem=next(filter(None, (_problem(found.path, part) for part in manifest.parts)), ""),
            step=manifest.step,
            evaluated=found.cursor.phase is Phase.EVALUATED,
            bytes=found.bytes,
            created=manifest.created,
            weights_digest=manifest.weights_digest,
            environment=tuple((name, str(value)) for name, value in manifest.environment.items()),
            # Of one that was not evaluated itself they are those of an earlier step.
            metrics=manifest.metrics if found.cursor.phase is Phase.EVALUATED else {},
            encrypted=manifest.encryption is not None,
            best=found.best,
            foreign="" if job is None else why_foreign(found, job),
        )


def read_checkpoints(folder: Path, job: JobSpec | None = None) -> tuple[CheckpointRecord, ...]:
    """All checkpoints in a folder, oldest first; none where it cannot be listed."""
    try:
        found = survey(folder)
    except CheckpointError:
        return ()
    # A job that runs removes old ones at any moment: what is gone by now was not damaged.
    return tuple(CheckpointRecord.of(each, job) for each in found if each.path.exists())


def nearest_saved(step: int, checkpoints: Iterable[CheckpointRecord]) -> int | None:
    """The step itself if a usable checkpoint holds its weights, else the nearest such, the earlier of two."""
    saved = {each.step for each in checkpoints if each.step is not None and not each.problem}
    return min(saved, key=lambda other: (abs(other - step), other), default=None)


def _problem(folder: Path, part: Part) -> str:
    try:
        size = (folder / part.file).stat().st_size
    except OSError as error:
        return f"{part.file} cannot be read: {error.strerror}"
    return "" if size == part.bytes else f"{part.file} has {size:,} bytes and the manifest says {part.bytes:,}"
