"""Layers of values, the later over the earlier, with the origin of each value."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quorate.spec.absent import Absent
from quorate.spec.override import Override
from quorate.spec.plain import plain_copy

DEFAULT = "default"
_LENGTHS = {"epochs", "steps"}


@dataclass(frozen=True)
class Layers:
    """What has been given so far, and where; keys are dotted in `origins` and nested in `values`."""

    values: dict[str, Any]
    origins: dict[str, str]

    def under(self, overrides: Iterable[Override]) -> "Layers":
        """These values with one more layer over them. Its steps replace epochs of the layers below, and the reverse."""
        overrides = list(overrides)
        values, origins = plain_copy(self.values), dict(self.origins)
        lengths = {override.key for override in overrides if override.value is not None} & _LENGTHS
        if lengths:
            for length in _LENGTHS:
                values.pop(length, None)
                origins.pop(length, None)
        for override in overrides:
            _put(values, override.key.split("."), plain_copy(override.value))
            inner = f"{override.key}."
            origins = {key: origin for key, origin in origins.items() if not key.startswith(inner)}
            origins[override.key] = override.origin
        return Layers(values, origins)

    def origin(self, path: str) -> str:
        """Where a given key was written: at its own place, or inside the value of a key above it."""
        while path not in self.origins and "." in path:
            path = path.rpartition(".")[0]
        return self.origins.get(path, DEFAULT)

    def origins_of(self, resolved: Mapping[str, Any]) -> dict[str, str]:
        """The origin of every single value of a resolved job."""
        return dict(self._origins(resolved, self.values, ""))

    def _origins(self, resolved: Mapping[str, Any], given: Any, prefix: str) -> Iterator[tuple[str, str]]:
        for key, value in resolved.items():
            path = f"{prefix}{key}"
            # Inside a given scalar (strategy: ring) everything is given by that scalar.
            inner = given.get(key, Absent.NOT_GIVEN) if isinstance(given, Mapping) else given
            if isinstance(value, Mapping) and value:
                yield from self._origins(value, {} if inner is Absent.NOT_GIVEN else inner, f"{path}.")
            else:
                yield path, DEFAULT if inner is Absent.NOT_GIVEN else self.origin(path)


def _put(values: dict[str, Any], parts: list[str], value: Any) -> None:
    *parents, last = parts
    for parent in parents:
        # What is no mapping has no inner keys, so setting one replaces it: a scalar strategy, a null section.
        if not isinstance(values.get(parent), dict):
            values[parent] = {}
        values = values[parent]
    values[last] = value
