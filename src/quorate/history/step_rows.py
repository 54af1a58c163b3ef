"""What steps tell, as rows of numbers in few bytes.

Rows are added one by one and packed when there are many. No numpy here: the launcher packs rows too.
"""

import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from quorate.observe.events import FAMILIES, StepCompleted

PHASES = ("data", "compute", "exchange", "apply")
STEP, TIME, SAMPLES, SPEED, LONGEST = "step", "time", "samples", "samples_per_second", "longest_data_s"
LOGGED = "log."
"""What the name of a column begins with that a task has logged."""

MISSING = float("nan")
_TIMES = tuple(f"{phase}_s" for phase in PHASES)
FILL: dict[str, float] = {SPEED: 0.0, LONGEST: 0.0, **dict.fromkeys(_TIMES, 0.0), SAMPLES: -1}
"""What a column has for a step that does not tell it; `MISSING` where nothing is said here."""
_WHOLE = frozenset({STEP, SAMPLES})
_LARGEST_WHOLE = 2**52
_PLAIN = frozenset(
    {"kind", "version", "epoch", "ledger", "own_order", "dropped", "planned", "draws", "lanes", "tensors"}
)
"""Fields of a step that are in no column, and whose types nobody here relies on."""
_NUMBERS = frozenset({TIME, SPEED, LONGEST, *_TIMES, *FAMILIES})


class StepRow(NamedTuple):
    """What a step tells: the numbers by their columns, and whether random numbers were drawn for its samples."""

    step: int
    time: float
    numbers: Mapping[str, float]
    draws: bool = False

    @classmethod
    def of(cls, event: StepCompleted) -> "StepRow":
        """From an event, whatever it has."""
        assert event.step is not None
        told = event.by_optimizer(*FAMILIES).items()
        numbers: dict[str, float] = {name: MISSING if number is None else number for name, number in told}
        for name in (SPEED, LONGEST, *_TIMES):
            if (number := getattr(event, name)) is not None:
                numbers[name] = number
        if event.samples is not None:
            numbers[SAMPLES] = min(event.samples, _LARGEST_WHOLE)
        numbers |= _logged(event.log or {})
        return cls(min(event.step, _LARGEST_WHOLE), event.time, numbers, event.draws)


def _logged(log: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among what a task has logged."""
    numbers = {name: value for name, value in log.items() if type(value) in (int, float)}
    return {LOGGED + name: float(value) for name, value in numbers.items() if not abs(value) > sys.float_info.max}


def plain_row(line: bytes) -> StepRow | None:
    """The row of a line that tells a step and nothing unusual; None where the line has to be read as an event.

    To make an event of a line takes five times as long, and long runs have millions of steps.
    """
    try:
        return _row_of(orjson.loads(line))
    except (ValueError, TypeError, AttributeError):
        return None


def _row_of(record: dict[str, Any]) -> StepRow:
    """Raises ValueError, or what comes of a record that is none, for anything that is not as it usually is."""
    numbers: dict[str, float] = {}
    for name, value in record.items():
        if name in _PLAIN:
            continue
        kind = type(value)
        if name in _NUMBERS or name.partition(".")[0] in FAMILIES:
            if kind is not float and (kind is not int or abs(value) > _LARGEST_WHOLE):
                raise ValueError(name)
            numbers[name] = float(value)
        elif name in _WHOLE:
            if kind is not int or not 0 <= value <= _LARGEST_WHOLE:
                raise ValueError(name)
            numbers[name] = value
        elif name == "log":
            numbers |= _logged(value)
        else:
            raise ValueError(name)
    step, time, draws = numbers.pop(STEP, None), numbers.pop(TIME, None), record.get("draws", False)
    if record["kind"] != "step" or step is None or time is None or not abs(time) <= sys.float_info.max:
        raise ValueError("this is no step")
    if type(draws) is not bool:
        raise ValueError("draws")
    return StepRow(int(step), time, numbers, draws)


class _Rows:
    """Rows that are still to be packed."""

    def __init__(self) -> None:
        self.columns: dict[str, list[float]] = {STEP: [], TIME: []}
        self.count = 0

    def add(self, row: StepRow) -> None:
        columns = self.columns
        columns[STEP].append(row.step)
        columns[TIME].append(row.time)
        for name, number in row.numbers.items():
            column = columns.get(name)
            if column is None:
                column = columns[name] = [FILL.get(name, MISSING)] * self.count
            column.append(number)
        self.count += 1
        if len(row.numbers) + 2 < len(columns):
            for name, column in columns.items():
                if len(column) < self.count:
                    column.append(FILL.get(name, MISSING))


@dataclass(frozen=True)
class PackedRows:
    """Rows in one piece: column after column, a double for each row."""

    count: int
    names: tuple[str, ...]
    content: bytes

    @classmethod
    def of(cls, rows: _Rows) -> "PackedRows":
        columns = rows.columns if rows.count else {}
        return cls(rows.count, tuple(columns), b"".join(array("d", numbers).tobytes() for numbers in columns.values()))

    def part(self, name: str) -> bytes | None:
        """The bytes of a column; None where no row has it."""
        if name not in self.names:
            return None
        at = self.names.index(name) * 8 * self.count
        return self.content[at : at + 8 * self.count]


@dataclass
class StepRows:
    """All rows of a run, in the order in which they were told: those that are packed, and those that are not yet."""

    packed: list[PackedRows] = field(default_factory=list)
    rows: "_Rows" = field(default_factory=lambda: _Rows())

    def add(self, row: StepRow) -> None:
        self.rows.add(row)

    def pack(self) -> PackedRows:
        """Pack the rows that were added since the last time; they stay here."""
        packed = PackedRows.of(self.rows)
        self.packed.append(packed)
        self.rows = _Rows()
        return packed

    @property
    def names(self) -> tuple[str, ...]:
        """Of all columns, in the order in which they were first told."""
        told = [name for packed in self.packed for name in packed.names]
        return tuple(dict.fromkeys([*told, *(self.rows.columns if self.rows.count else ())]))
