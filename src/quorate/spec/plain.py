"""Values that a job file can hold: null, booleans, finite numbers, text, lists and mappings with text keys."""

import math
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any

from quorate.core.errors import Problem
from quorate.spec.problems import Origin, describe, in_brackets

_SCALARS = (NoneType, bool, int, float, str)


def plain_copy(value: Any) -> Any:
    """The value with tuples as lists, sharing nothing with the original, which its owner may change later."""
    if isinstance(value, Mapping):
        return {key: plain_copy(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_copy(inner) for inner in value]
    return value


def plain_problems(value: Any, path: str, origin: Origin) -> Iterator[Problem]:
    """Everything inside a value that could not be written into the run folder and read back equal."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from plain_problems(inner, f"{path}.{key}" if path else str(key), origin)
            if not isinstance(key, str):
                yield Problem(path or "job", f"the key {key!r} is not text{in_brackets(origin(path))}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from plain_problems(inner, f"{path}[{index}]", lambda _: origin(path))
    elif isinstance(value, float) and not math.isfinite(value):
        yield Problem(path, f"{describe(value)} is not a finite number{in_brackets(origin(path))}")
    # The exact type: a NumPy number passes for a float and cannot be written down as one.
    elif type(value) not in _SCALARS:
        text = f"{describe(value)} is no value that a job file can hold{in_brackets(origin(path))}"
        yield Problem(path, text, "Use plain numbers, text, lists and mappings.")
