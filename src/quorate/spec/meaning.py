"""What a job means: the values by which its results can differ, alike for two jobs that come to the same bits."""

import dataclasses
import hashlib
import math
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from typing import Any
from uuid import UUID

from pydantic import BaseModel, SecretBytes, SecretStr

from quorate.core.masking import shown_value
from quorate.spec.job import JobSpec, mark_of
from quorate.spec.keys import Mark

LENGTH = ("steps", "epochs")
"""Until when is trained: a job of more steps goes through the states of a shorter one."""
_NOT_HERE = frozenset({"task", "params", "device", "precision", "compile", "strategy"})
# Secrets have few guesses now and then: each costs as much as this takes.
_SCRYPT: dict[str, int] = {"n": 2**14, "r": 8, "p": 1}


def meaning_of(spec: JobSpec, workers: int) -> dict[str, Any]:
    """By key the values of a job that affect results, but for those that a worker knows better: the task with its
    params, and where and how precisely it computes."""
    dumped = spec.model_dump(mode="json")
    found = {key: value for key, value in dumped.items() if mark_of(key) is Mark.MEANING and key not in _NOT_HERE}
    strategy = spec.strategy
    if strategy.fixes_bits:  # whoever adds up what the lanes have: the sums are the same
        found["strategy"] = {key: dumped["strategy"].get(key, value) for key, value in strategy.arithmetic.items()}
        found["strategy"] |= {"kind": strategy.kind} if strategy.keeps_residuals else {}
    else:
        found |= {"strategy": dumped["strategy"], "workers": workers}
    return found


def plain_params(params: dict[str, Any]) -> tuple[Any, str]:
    """The params of a task as JSON, so that no two that differ are equal; and which have no text that says all.

    What a job writes otherwise than the task has it, such as a path, is an object there.
    """
    unknown: list[str] = []
    plain = {name: _plainly(value, name, unknown) for name, value in params.items()}
    return params_of(plain), f"the text of params.{unknown[0]} does not say all of it" if unknown else ""


_BY_REPR = (float, complex, bytes, range, Decimal, Fraction, UUID, datetime, date, time, timedelta)


def _plainly(value: Any, name: str, unknown: list[str]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind in (list, tuple):
        return [_plainly(each, f"{name}[{index}]", unknown) for index, each in enumerate(value)]
    if kind is dict and all(type(key) is str for key in value):
        return {key: _plainly(each, f"{name}.{key}", unknown) for key, each in value.items()}
    if isinstance(value, SecretStr | SecretBytes):
        return _secret(name.rpartition(".")[2], value.get_secret_value())
    return {"type": kind.__qualname__, "value": _text_of(value, name, unknown)}


def _text_of(value: Any, name: str, unknown: list[str]) -> Any:
    kind = type(value)
    if kind is dict:
        return [[_plainly(each, f"{name}[{key!r}]", unknown) for each in (key, one)] for key, one in value.items()]
    if kind in (set, frozenset):
        return sorted((_plainly(each, name, unknown) for each in value), key=repr)
    if isinstance(value, BaseModel) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        return {field: _plainly(each, f"{name}.{field}", unknown) for field, each in _fields_of(value)}
    if isinstance(value, PurePath | Enum):
        return value.name if isinstance(value, Enum) else str(value)
    if kind in _BY_REPR:
        return repr(value)
    unknown.append(name)
    return ""


def _fields_of(record: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(record, "__dict__", {}).items()
    if isinstance(record, BaseModel):
        yield from (record.__pydantic_extra__ or {}).items()
        yield from (record.__pydantic_private__ or {}).items()
    elif not hasattr(record, "__dict__"):
        yield from ((field.name, getattr(record, field.name)) for field in dataclasses.fields(record))


def params_of(params: Any, key: str = "params") -> Any:
    """The same for people to read: of what is secret there is a digest, which tells two values apart."""
    if isinstance(params, dict):
        return {name: params_of(value, f"{key}.{name}") for name, value in params.items()}
    if isinstance(params, list | tuple):
        return [params_of(value, key) for value in params]
    if shown_value(key, params) == params:
        return params
    return _secret(key, params)


def _secret(key: str, value: Any) -> str:
    content = value if isinstance(value, bytes) else str(value).encode()
    return f"scrypt:{hashlib.scrypt(content, salt=key.encode(), dklen=16, **_SCRYPT).hex()}"
