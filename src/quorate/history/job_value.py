"""The values of a recorded job, one by one."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quorate.spec.job import mark_of
from quorate.spec.marks import Mark
from quorate.spec.override import DEFAULT
from quorate.spec.resolved import ResolvedJob


@dataclass(frozen=True)
class JobValue:
    """A key (dotted) with its value, where that was given, and whether it changes the bits."""

    key: str
    value: Any
    origin: str
    mark: Mark

    @property
    def is_default(self) -> bool:
        """Whether nobody gave it."""
        return self.origin == DEFAULT


def job_values(job: ResolvedJob) -> tuple[JobValue, ...]:
    """Every value of a job, in the order of the job file's keys."""
    return tuple(
        JobValue(key, value, job.origins.get(key, DEFAULT), mark_of(key))
        for key, value in _leaves("", job.spec.model_dump())
    )


def _leaves(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value
