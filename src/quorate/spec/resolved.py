"""A job with all its layers applied, and its form in the run folder."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from quorate.core.errors import RunError
from quorate.core.regular_file import read_regular
from quorate.spec.job import JobSpec
from quorate.spec.yaml_document import write_value

# Several times as fast as the loader of job files. What `dump_job` has written, every YAML reader reads alike.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DEEPEST = 50

_HEADER = "# The job as it was resolved: every key, with where its value came from."


@dataclass(frozen=True)
class ResolvedJob:
    """A valid job, the origin of each of its values by dotted key, and the file or call that it was read from.
    `removed`: keys that it was recorded with and that this version has no more, each with what to do instead."""

    spec: JobSpec
    origins: dict[str, str]
    source: str
    removed: Mapping[str, str] = field(default_factory=dict)


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
