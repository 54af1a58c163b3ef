"""What differs between two jobs, and what of it a resumed run cannot take."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quorate.spec.job import JobSpec, mark_of
from quorate.spec.marks import Mark
from quorate.spec.override import Absent
from quorate.spec.yaml_document import write_value

SAME_BITS: dict[str, frozenset[str]] = {"ring": frozenset()}
"""By kind of strategy, the other kinds with which a run may be resumed: they come to the same bits."""


@dataclass(frozen=True)
class Change:
    """A key (dotted) with its two values."""

    key: str
    before: Any
    after: Any
    mark: Mark

    def __str__(self) -> str:
        before, after = (
            # As in the job file: null, not None.
            str(value) if isinstance(value, Absent) else write_value(value)
            for value in (self.before, self.after)
        )
        return f"{self.key}: {before} → {after}"


def changes(before: JobSpec, after: JobSpec) -> tuple[Change, ...]:
    """Every key that differs, in the order of the job file's keys."""
    found = _differences("", before.model_dump(), after.model_dump())
    return tuple(Change(key, old, new, mark_of(key)) for key, old, new in found)


def refused_on_resume(before: JobSpec, after: JobSpec) -> tuple[Change, ...]:
    """The changes that would make a resumed run produce something else."""
    meant = (change for change in changes(before, after) if change.mark is Mark.MEANING)
    return tuple(change for change in meant if not (_extends(change) or keeps_bits(change)))


def keeps_bits(change: Change) -> bool:
    """Whether it is a strategy of another kind that goes on to the same bits."""
    return change.key == "strategy.kind" and change.after in SAME_BITS.get(change.before, ())


def _extends(change: Change) -> bool:
    """Training longer goes on from all that was trained before, so it is no other job.

    With a linear or cosine `schedule` it ends elsewhere than a job that was this long from the start: the rate depends
    on the total. Whoever resumes says so.
    """
    both_given = change.before is not None and change.after is not None
    return change.key in {"epochs", "steps"} and both_given and bool(change.after > change.before)


def _differences(path: str, before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in {**before, **after}:
            inner = f"{path}.{key}" if path else key
            yield from _differences(inner, before.get(key, Absent.NOT_GIVEN), after.get(key, Absent.NOT_GIVEN))
    else:
        # By how they are written: Python holds 1, 1.0 and True for equal; a task may not.
        old, new = (json.dumps(value, sort_keys=True, default=repr) for value in (before, after))
        if old != new:
            yield path, before, after
