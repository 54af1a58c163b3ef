"""A job with all its layers applied, its form in the run folder, and what differs between two of them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from quorate.core.errors import RunError
from quorate.core.masking import shown_value
from quorate.core.regular_file import read_regular
from quorate.spec.job import JobSpec, mark_of
from quorate.spec.keys import Mark
from quorate.spec.override import Absent
from quorate.spec.strategy import goes_on
from quorate.spec.yaml_document import write_value

# Several times as fast as the loader of job files. What `dump_job` has written, every YAML reader reads alike.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DEEPEST = 50

_HEADER = "# The job as it was resolved: every key, with where its value came from."


@dataclass(frozen=True)
class ResolvedJob:
    """A valid job, the origin of each of its values by dotted key, and the file or call that it was read from."""

    spec: JobSpec
    origins: dict[str, str]
    source: str


def dump_job(resolved: ResolvedJob) -> str:
    """YAML with every key, its origin behind it; `load_recorded` reads it back equal."""
    return "\n".join([_HEADER, *dump_lines(resolved.spec.model_dump(), resolved.origins), ""])


def dump_lines(
    values: Mapping[str, Any], origins: Mapping[str, str], path: str = "", indent: str = ""
) -> Iterator[str]:
    """A line of YAML for each key, with its origin behind it."""
    for key, value in values.items():
        inner, written = f"{path}{key}", write_value(key)
        if isinstance(value, Mapping) and value:
            yield f"{indent}{written}:"
            yield from dump_lines(value, origins, f"{inner}.", f"{indent}  ")
        else:
            # An origin may hold a file's name, and a file's name may hold a line end.
            origin = " ".join(origins.get(inner, "").split())
            yield f"{indent}{written}: {write_value(value)}" + (f"  # {origin}" if origin else "")


def glance_at_recorded(path: Path) -> dict[str, Any]:
    """The keys of the job in a run folder, for a list of many runs; `load_recorded` reads one with care."""
    try:
        content = read_regular(path)
        # Nested too deeply, a damaged file would end the whole process, in the library that reads it.
        values = yaml.load(content, _LOADER) if _is_shallow(content) else None
    except FileNotFoundError:
        raise job_gone(path) from None
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise RunError(f"{path} is not YAML ({reason}); it was edited or damaged after the run wrote it") from None
    if not isinstance(values, dict):
        raise RunError(f"{path} holds no keys; it was edited or damaged after the run wrote it")
    return values


def job_gone(path: Path) -> RunError:
    """What to say of a run whose recorded job is not there: its checkpoints hold it too."""
    return RunError(f"{path} is gone; quorate resume takes the job from the newest checkpoint, and writes it again")


def _is_shallow(content: bytes) -> bool:
    depth = 0
    for event in yaml.parse(content, _LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            return False
    return True


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
