"""A job with all its layers applied, and its form in the run folder."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quorate.spec.job import JobSpec
from quorate.spec.yaml_dialect import write_value

_HEADER = "# The job as it was resolved: every key, with where its value came from."


@dataclass(frozen=True)
class ResolvedJob:
    """A valid job, the origin of each of its values by dotted key, and the file or call that it was read from."""

    spec: JobSpec
    origins: dict[str, str]
    source: str


def dump_job(resolved: ResolvedJob) -> str:
    """YAML with every key, its origin behind it; `load_recorded` reads it back equal."""
    return "\n".join([_HEADER, *_lines(resolved.spec.model_dump(), resolved.origins), ""])


def _lines(values: Mapping[str, Any], origins: Mapping[str, str], path: str = "", indent: str = "") -> Iterator[str]:
    for key, value in values.items():
        inner, written = f"{path}{key}", write_value(key)
        if isinstance(value, Mapping) and value:
            yield f"{indent}{written}:"
            yield from _lines(value, origins, f"{inner}.", f"{indent}  ")
        else:
            # An origin may hold a file's name, and a file's name may hold a line end.
            origin = " ".join(origins.get(inner, "").split())
            yield f"{indent}{written}: {write_value(value)}" + (f"  # {origin}" if origin else "")
