"""What every event has: when it happened, at which step, and how it becomes a record of `events.jsonl` and back."""

import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Annotated, Any, ClassVar, Self, TypeVar, cast, dataclass_transform

import orjson
from pydantic import Field, TypeAdapter, ValidationError

VERSION = 1
"""Of the records that are written. Those without one were written before there was a version, and are the same."""

Count = Annotated[int, Field(strict=True, ge=0)]
Number = Annotated[float, Field(strict=True)]
Ranges = tuple[tuple[Count, Count], ...]
"""The first and the last of each range of samples."""

HEAD = frozenset({"kind", "version"})

KINDS: "dict[str, type[Event]]" = {}
"""The class of each kind that this version knows."""

Cls = TypeVar("Cls", bound=type)

# Made when the first event of a kind is read: all of them together take a while, which no command should wait for.
_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def event(kind: str) -> Callable[[Cls], Cls]:
    """The class of a kind of events: a frozen dataclass to the reader and the type checker, and not at run time.

    A step has twenty fields. To set them in a class that is frozen then takes three times as long, and training waits.
    """

    def decorate(cls: Cls) -> Cls:
        made: Any = dataclass(slots=True, kw_only=True)(cls)
        if kind:
            made.KIND = kind
            KINDS[kind] = made
        return cast(Cls, made)

    return decorate


@event(kind="")
class Event:
    """One thing that happened. A class for each kind adds its fields.

    A field without a default is always written. One that has its default is left out; where a record of another
    version leaves it out, or has something of another type in its place, it has its default. What a record has of
    another type, or beside the fields, is kept as `extra`.
    """

    KIND: ClassVar[str] = ""

    step: Count | None = None
    time: Number = field(default_factory=time.time)
    extra: dict[str, Any] | None = None

    @property
    def kind(self) -> str:
        return self.KIND

    def to_record(self) -> dict[str, Any]:
        """As one JSON object: plain values only."""
        record: dict[str, Any] = {"kind": self.KIND, "version": VERSION, "time": round(self.time, 6)}
        if self.step is not None:
            record["step"] = self.step
        record |= self.own_fields()
        return record if self.extra is None else record | self.extra

    def to_json(self) -> str:
        """One line of `events.jsonl`, without blanks. By orjson, which takes a twelfth of the time, wherever it writes
        the same as the standard library."""
        record = self.to_record()
        with suppress(orjson.JSONEncodeError):
            line = orjson.dumps(record)
            # It writes null for what is not finite.
            if b"null" not in line:
                return line.decode()
        return json.dumps(record, separators=(",", ":"))

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """The event that a record of this kind tells. Raises ValueError where it lacks what is always written."""
        told, adapter = cls.own_record(record), _adapter(cls)
        try:
            made: Self = adapter.validate_python(told)
        except ValidationError as error:
            wrong = {str(problem["loc"][0]) for problem in error.errors()}
            others = {name: told.pop(name) for name in wrong & told.keys()}
            made = adapter.validate_python({**told, "extra": {**told.get("extra", {}), **others}})
        return made

    def own_fields(self) -> dict[str, Any]:
        """What the kind adds, as it is written."""
        told: dict[str, Any] = plain(self)
        return told

    @classmethod
    def own_record(cls, record: Mapping[str, Any]) -> dict[str, Any]:
        """A record by the names of the fields, and the rest as `extra`."""
        known = _names(cast(Any, cls))
        told = {name: value for name, value in record.items() if name in known}
        extra = {name: value for name, value in record.items() if name not in known and name not in HEAD}
        return {**told, "extra": extra} if extra else told


@event(kind="")
class UnknownEvent(Event):
    """An event of a kind that this version does not know, or without what every one of its kind tells."""

    record: dict[str, Any]

    @property
    def kind(self) -> str:
        return str(self.record["kind"])

    def to_record(self) -> dict[str, Any]:
        return self.record


@dataclass(frozen=True, slots=True)
class DeviceMemoryUse:
    """The peak GPU memory of a worker: allocated by tensors, reserved with PyTorch's cache (which holds that of CUDA
    graphs), and the total of the GPU."""

    allocated_bytes: Count
    reserved_bytes: Count
    total_bytes: Count

    def with_earlier(self, other: "DeviceMemoryUse | None") -> "DeviceMemoryUse":
        if other is None:
            return self
        allocated = max(self.allocated_bytes, other.allocated_bytes)
        return DeviceMemoryUse(allocated, max(self.reserved_bytes, other.reserved_bytes), self.total_bytes)


def plain(value: Any) -> Any:
    """As JSON has it. Of an event, or of a part of one, the fields but for those that have their default."""
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    if not hasattr(value, "__dataclass_fields__"):
        return value
    told = ((name, default, getattr(value, name)) for name, default in _defaults(value.__class__))
    return {name: plain(each) for name, default, each in told if each != default}


@cache
def _defaults(cls: type) -> tuple[tuple[str, Any], ...]:
    """What each field that a class adds has if it is left out. Parts of an event are written whole, but for blanks."""
    own = [each for each in fields(cls) if not issubclass(cls, Event) or each.name not in ("step", "time", "extra")]
    return tuple((each.name, each.default if issubclass(cls, Event) else each.default or None) for each in own)


@cache
def _names(cls: type) -> frozenset[str]:
    return frozenset(each.name for each in fields(cls)) - {"extra"}


def record_in(line: str | bytes) -> dict[str, Any]:
    """The record of a line. Raises ValueError for one without a kind, a time and a step that there can be."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        try:
            record = json.loads(line)  # which also reads NaN and whole numbers of any length
        except RecursionError:
            raise ValueError("this is nested too deeply") from None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        raise ValueError("this is no event")
    time, step = record.get("time"), record.get("step")
    if type(time) not in (int, float) or not abs(time) <= sys.float_info.max:  # type: ignore[arg-type]
        raise ValueError("this is no event")
    if step is not None and (type(step) is not int or step < 0):
        raise ValueError("this is an event of a step that there cannot be")
    return record
