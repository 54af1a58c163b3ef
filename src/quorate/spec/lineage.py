"""The lineage of a job: what it was until certain steps, as jobs of their own; and what a branch adds to it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quorate.core.errors import JobFileError
from quorate.spec.changes import changes
from quorate.spec.job import CHANGEABLE, OWN_PLACE, JobSpec, LineageSpec
from quorate.spec.keys import Mark
from quorate.spec.load import resolve_layers
from quorate.spec.override import Layers, Override
from quorate.spec.resolved import ResolvedJob

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
