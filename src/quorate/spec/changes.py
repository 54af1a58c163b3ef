"""What differs between two jobs, and which of it a resumed run may not change."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quorate.core.masking import shown_value
from quorate.spec.job import JobSpec, mark_of
from quorate.spec.keys import Absent, Mark
from quorate.spec.strategy import goes_on


@dataclass(frozen=True)
class Change:
    """A key (dotted) with its two values."""

    key: str
    before: Any
    after: Any
    mark: Mark

    def __str__(self) -> str:
        from quorate.spec.yaml_document import write_value  # a worker says nothing of them

        before, after = (
            # As in the job file: null, not None.
            str(value) if isinstance(value, Absent) else write_value(value)
            for value in (self.before, self.after)
        )
        return f"{self.key}: {before} → {after}"


def changes(before: JobSpec, after: JobSpec) -> tuple[Change, ...]:
    """Every key that differs, in the order of the job file's keys, for people to read: what is secret is masked."""
    found = _differences("", before.model_dump(), after.model_dump())
    return tuple(Change(key, shown_value(key, old), shown_value(key, new), mark_of(key)) for key, old, new in found)


def refused_on_resume(before: JobSpec, after: JobSpec) -> tuple[Change, ...]:
    """The changes that would make a resumed run produce something else."""
    is_same, is_together = goes_on(before.strategy, after.strategy), after.strategy.couples_passes
    return tuple(
        change
        for change in changes(before, after)
        # Over how many samples batch norm takes its statistics is a matter of workers then.
        if change.mark is Mark.MEANING or (is_together and change.key == "workers")
        if not (_extends(change) or (is_same and change.key.startswith("strategy.")))
    )


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
