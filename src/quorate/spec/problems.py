"""How mistakes are worded: what was given, where, what is allowed, and what was probably meant."""

import math
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from types import NoneType
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from quorate.core.errors import Problem
from quorate.spec.keys import CALLED_ELSEWHERE, FOLDER, PREFIX, Key, beside_names, keys_of, nearest, one_of, suggestions
from quorate.spec.options import SectionType, removed_keys
from quorate.spec.override import ENVIRONMENT, NAMES, variable_name

Origin = Callable[[str], str]

ELSEWHERE = {
    "gpu": "cuda",
    "nvidia": "cuda",
    "float32": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "cuda": "cuda",
}
"""How others call a choice of a key."""

# Values that a job file can hold, with lists and mappings of them.
_SCALARS = (NoneType, bool, int, float, str)


def validated(
    model: type[SectionType], values: Any, origin: Origin, prefix: str = "", folder: Path | None = None
) -> tuple[SectionType | None, list[Problem]]:
    """A section, None where its keys or values are wrong, and every mistake in it. Paths are relative to `folder`."""
    odd = list(plain_problems(values, prefix, origin))
    try:
        return model.model_validate(values, context=folder and {FOLDER: folder}), odd
    except ValidationError as error:
        problems = describe_errors(error, model, prefix, origin)
    told = {problem.path for problem in problems}
    # What is wrong inside of a value that is refused anyway is told once.
    return None, [*problems, *(one for one in odd if not {one.path, one.path.partition("[")[0]} & told)]


def describe_errors(
    error: ValidationError, model: type[BaseModel], prefix: str = "", origin: Origin = lambda _: ""
) -> list[Problem]:
    """One problem for each key that pydantic complains about; `origin` tells where a key's value was written."""
    keys = keys_of(model, prefix)
    located = [(_path(details, keys, prefix), details) for details in error.errors(include_url=False)]
    meant = misspelt([path for path, _ in located], keys)
    problems = []
    # A union complains once for each of its members: they are one mistake.
    for path, group in groupby(located, key=lambda pair: pair[0]):
        details = next(group)[1]
        if details["type"] == "extra_forbidden":
            problems.append(_unknown_key(path, keys, origin(path)))
        elif details["type"] not in ("missing", "union_tag_not_found"):
            problems.append(_wrong_value(path, keys, details, origin(path)))
        elif path not in meant:
            what = f": give {keys[path].allowed}" if path in keys else ""
            problems.append(Problem(path, f"it is missing, and it has no default{what}"))
    return problems


def misspelt(paths: list[str], keys: dict[str, Key]) -> set[str]:
    """The keys that were probably meant by unknown paths: they are not missing as well."""
    return {meant for path in paths if path not in keys for meant in suggestions(path, keys)}


def describe(value: Any) -> str:
    """A value as it was read, so that text that looks like a number is told from a number."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    if isinstance(value, str):
        return f'the text "{_shortened(value)}"'
    if type(value) in (int, float):
        return _shortened(repr(value))
    if isinstance(value, list | tuple | dict):
        kind = "mapping" if isinstance(value, dict) else "list"
        return f"the {kind} {_shortened(repr(value))}"
    return f"{_shortened(repr(value))} (a {type(value).__name__})"


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _path(details: ErrorDetails, keys: dict[str, Key], prefix: str) -> str:
    """The key that an error is about, and the place inside its value; pydantic names the member of a union as well."""
    path = prefix
    for index, part in enumerate(details["loc"]):
        inner = f"{path}.{part}" if path else str(part)
        key, kind = keys.get(path), keys.get(f"{path}.kind")
        # Where a section is of one of several kinds, its kind is named between it and its keys.
        if inner not in keys and key and key.alternatives > 1 and kind and part in kind.choices:
            continue
        if inner not in keys and details["type"] != "extra_forbidden":
            if key is None:
                return str(part)
            parts = () if key.complete or key.alternatives > 1 else details["loc"][index:]
            return path + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
        path = inner
    return f"{path}.kind" if details["type"].startswith("union_tag") else path


def _wrong_value(path: str, keys: dict[str, Key], details: ErrorDetails, origin: str) -> Problem:
    value, kind = details["input"], details["type"]
    if kind == "union_tag_invalid":
        value = value["kind"]
    key = keys.get(path)
    if key and (key.complete or kind.endswith(("_type", "literal_error"))):
        text = f"{describe(value)} is not {key.allowed}"
    else:
        text = f"{describe(value)} is refused: {details['msg'][0].lower()}{details['msg'][1:]}"
    return Problem(path, text + in_brackets(origin), _value_hint(value, details, key.choices if key else ()))


def _value_hint(value: Any, details: ErrorDetails, choices: tuple[str, ...]) -> str:
    kind = details["type"]
    if kind == "value_error":
        return str(details.get("ctx", {}).get("error", ""))
    if value is None:
        return "Write a value behind the colon, or leave the key out."
    if kind == "string_type" and isinstance(value, bool | int | float):
        return f'If text is meant, write it in quotes: "{str(value).lower()}".'
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"A number with a dot or an exponent is not read as a whole one: write {int(value)}."
    if isinstance(value, str):
        return _text_hint(value, kind, choices)
    return ""


def _text_hint(value: str, kind: str, choices: tuple[str, ...]) -> str:
    if kind == "bool_type" and value.lower() in {"yes", "on", "no", "off"}:
        return f"Write {'true' if value.lower() in {'yes', 'on'} else 'false'}."
    usual = ELSEWHERE.get(value.lower().partition(":")[0])
    if meant := [usual] if usual in choices else nearest(value, list(choices)):
        return f"Did you mean {meant[0]}?"
    is_number = value.strip().lstrip("+-").replace(".", "", 1).isdecimal()
    return f"Write {value.strip()} without quotes." if is_number and kind in {"int_type", "float_type"} else ""


def _unknown_key(path: str, keys: dict[str, Key], origin: str) -> Problem:
    parent = path.rpartition(".")[0]
    meant = suggestions(path, keys)
    if meant and origin.startswith(f"{ENVIRONMENT}{PREFIX}"):
        meant = [variable_name(key) for key in meant]
    hint = f"Did you mean {one_of(meant)}?" if meant else f"The keys here: {', '.join(beside_names(parent, keys))}."
    if meant == ["batch_size"] and path in CALLED_ELSEWHERE:
        hint += " That counts the samples of all devices and accumulated passes together."
    if path in NAMES:
        hint = f"It is called {NAMES[path]} since version 2 of the job file."
    elif path in (removed := removed_keys()):
        hint = f"It was removed: {removed[path].instead}"
    elif not parent and not meant:
        hint = f"If it is a parameter of the task, write it under params. {hint}"
    return Problem(path, f"there is no such key{in_brackets(origin)}", hint)


def in_brackets(origin: str) -> str:
    """An origin behind a text, if there is one."""
    return f" ({origin})" if origin else ""


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
        text = f"{describe(value)} is not a value that a job file can hold{in_brackets(origin(path))}"
        yield Problem(path, text, "Use plain numbers, text, lists and mappings.")
