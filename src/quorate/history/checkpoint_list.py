"""The checkpoints of a run: what each is, and why it is kept."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quorate.checkpoint.listing import cursor_of
from quorate.checkpoint.retention import Reason, Retention, reasons
from quorate.core.cursor import Cursor
from quorate.core.errors import QuorateError
from quorate.history.checkpoint_record import CheckpointRecord, read_checkpoints
from quorate.history.run_record import RunRecord
from quorate.spec.job import CheckpointSpec, JobSpec
from quorate.spec.load import load_recorded
from quorate.spec.resolved import glance_at_recorded
from quorate.storage.run_folder import RunFolder


@dataclass(frozen=True)
class Kept:
    """A checkpoint of a run; `because` is empty for one that goes with the next save."""

    path: Path
    record: CheckpointRecord
    because: tuple[Reason, ...]

    @property
    def step(self) -> int:
        """As its name says: that of a damaged one is known by nothing else."""
        cursor = cursor_of(self.path.name)
        return cursor.step if cursor else 0

    @property
    def is_best(self) -> bool:
        """Whether it is of the step of the best evaluation."""
        return Reason.BEST in self.because

    def age(self, now: datetime) -> float | None:
        """Seconds since it was saved, if that is known."""
        try:
            return max(0.0, (now - datetime.fromisoformat(self.record.created).astimezone(UTC)).total_seconds())
        except ValueError:
            return None


@dataclass(frozen=True)
class CheckpointList:
    """All checkpoints of a run, oldest first."""

    run: str
    folder: Path
    checkpoints: tuple[Kept, ...]

    @classmethod
    def read(cls, run: RunFolder) -> "CheckpointList":
        """From a run's folder: no part is read through, so damage inside of one does not show."""
        job: JobSpec | None = None
        with contextlib.suppress(QuorateError):
            job = load_recorded(run.job_file, {}, []).spec
        found = read_checkpoints(run.checkpoints, job)
        records = {cursor: each for each in found if (cursor := cursor_of(each.name))}
        best = RunRecord.read(run).best
        whole = max((cursor for cursor, each in records.items() if not each.problem), default=None)
        # Retention counts those with a sound manifest only.
        listed = [cursor for cursor, each in records.items() if each.step is not None]
        why: Mapping[Cursor, tuple[Reason, ...]] = reasons(
            listed,
            _retention(run),
            None if best is None else best.step,
            whole,
            {cursor: each.best for cursor, each in records.items()},
        )
        kept = tuple(Kept(run.checkpoints / each.name, each, why.get(cursor, ())) for cursor, each in records.items())
        return cls(run.name, run.path, kept)


def _retention(run: RunFolder) -> Retention:
    """As the recorded job says; the usual one where that cannot be read."""
    usual = CheckpointSpec()
    try:
        section: Any = glance_at_recorded(run.job_file).get("checkpoint")
    except QuorateError:
        section = None
    keys = section if isinstance(section, dict) else {}
    keep, keep_every = keys.get("keep", usual.keep), keys.get("keep_every", usual.keep_every)
    return Retention(
        keep if type(keep) is int else usual.keep, keep_every if type(keep_every) is int and keep_every > 0 else None
    )
