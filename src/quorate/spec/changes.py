"""What differs between two jobs, which of it a resumed run may not change, and the lineage of a job: what it was until
certain steps, as jobs of their own."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quorate.core.errors import JobFileError
from quorate.core.masking import shown_value
from quorate.spec.job import CHANGEABLE, OWN_PLACE, JobSpec, LineageSpec, mark_of
from quorate.spec.keys import Absent, Mark
from quorate.spec.load import resolve_layers
from quorate.spec.options import goes_on
from quorate.spec.override import Layers, Override
from quorate.spec.resolved import ResolvedJob


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


# --- the lineage of a job, and what a branch adds to it

PART = "part"
"""What the job of a part is called."""


def parts_of(resolved: ResolvedJob) -> list[ResolvedJob]:
    """The jobs that a job was before: each with what led to it, and as long as the whole, since that decides the rates.

    Where checkpoints are copied to, and who is notified, is for the job itself.
    """
    parts = []
    for number, entry in enumerate(resolved.spec.lineage):
        origin = f"lineage[{number}]"
        given = entry.model_dump(exclude={"until"})
        overrides = [Override(key, value, f"{origin}.{key}") for key, value in given.items()]
        before = [part.model_dump() for part in resolved.spec.lineage[:number]]
        manner = {"lineage": before, "name": PART, "checkpoint.to": [OWN_PLACE], "notify": None}
        overrides += [Override(key, value, origin) for key, value in manner.items()]
        layers = Layers(resolved.spec.model_dump(), resolved.origins)
        try:
            parts.append(resolve_layers(layers, resolved.source, {}, overrides))
        except JobFileError as error:
            problems = [replace(problem, path=f"{origin}.{problem.path}") for problem in error.problems]
            raise JobFileError(resolved.source, problems) from None
    return parts


def chained(jobs: Sequence[ResolvedJob], ends: Sequence[int]) -> ResolvedJob:
    """The last of some jobs, with those before it as its lineage: each trained until the step at which the next
    branches off."""
    job = jobs[0]
    for branch, step in zip(jobs[1:], ends, strict=True):
        job = with_branch(job.spec, branch, step)
    return job


def with_branch(recorded: JobSpec, resolved: ResolvedJob, step: int) -> ResolvedJob:
    """The job of a branch with its lineage: trained anew, it becomes what it was until the step that it branches off.

    Only where that can be said, by keys that may change on the way; else it has no lineage.
    """
    spec = resolved.spec
    if spec.lineage not in ([], recorded.lineage):  # whoever gives another knows better
        return resolved
    changed = {change.key.partition(".")[0] for change in changes(recorded, spec) if change.mark is Mark.MEANING}
    changed -= {"task", "lineage"}
    if not changed or not step:
        lineage = recorded.lineage
    elif changed <= set(CHANGEABLE) and spec.early_stop is None and step < (spec.steps or step + 1):
        lineage = _extended(recorded, changed, step)
    else:
        lineage = []
    if lineage == spec.lineage:
        return resolved
    origins = {**resolved.origins, "lineage": f"branch at step {step}"}
    return replace(resolved, spec=spec.model_copy(update={"lineage": lineage}), origins=origins)


def _extended(recorded: JobSpec, changed: set[str], step: int) -> list[LineageSpec]:
    # All keys that any part has: what one leaves out would be that of the job, which is another now.
    keys = changed.union(*(part.model_fields_set for part in recorded.lineage)) - {"until"}
    own = recorded.model_dump(include=keys)
    earlier: list[dict[str, Any]] = [own | part.model_dump() for part in recorded.lineage if part.until < step]
    return [LineageSpec.model_validate(part) for part in [*earlier, own | {"until": step}]]
