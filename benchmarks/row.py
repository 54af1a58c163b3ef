"""What was measured of one system in one case, and how it compares."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Reading:
    """What one start of a script has measured of one case: milliseconds, one number for each repetition."""

    system: str
    case: str
    processes: int
    ms: tuple[float, ...]
    bytes: int | None = None
    threads: int = 1
    details: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, system: str, fields: Mapping[str, Any]) -> "Reading":
        """From the answer of a system's script, which names the system where it measures several."""
        return cls(**{"system": system, **fields, "ms": tuple(fields["ms"])})

    @property
    def place(self) -> tuple[str, str, int, int | None, int]:
        """Equal for readings of the same thing in different rounds."""
        return self.system, self.case, self.processes, self.bytes, self.threads


@dataclass(frozen=True)
class Row:
    """One system in one case: the median over the repetitions of all rounds, and the median of each round.

    `ratio_to` has, for rows of Quorate, the time of each peer divided by ours: above 1 we are faster.
    """

    bench: str
    case: str
    system: str
    processes: int
    threads: int
    bytes: int | None
    ms: float
    rounds_ms: tuple[float, ...]
    ratio_to: Mapping[str, float] = field(default_factory=dict)
    details: Mapping[str, float] = field(default_factory=dict)

    @property
    def spread(self) -> float | None:
        """Half of what lies between the best and the worst round, as a share of the median; none with one round."""
        if len(self.rounds_ms) < 2 or not self.ms:
            return None
        return (max(self.rounds_ms) - min(self.rounds_ms)) / 2 / self.ms

    def with_details(self, **details: float) -> "Row":
        """The same row with more to tell."""
        return replace(self, details={**self.details, **details})

    def to_dict(self) -> dict[str, Any]:
        """For a JSON document."""
        return asdict(self) | {"rounds_ms": list(self.rounds_ms)}


def rows_of(bench: str, readings: Iterable[Reading]) -> list[Row]:
    """One row for each thing that was measured, in the order in which they were first."""
    places: dict[tuple[Any, ...], list[Reading]] = {}
    for reading in readings:
        places.setdefault(reading.place, []).append(reading)
    return [_row(bench, rounds) for rounds in places.values()]


def compared(rows: Sequence[Row], ours: frozenset[str], label: Callable[[Row], str]) -> list[Row]:
    """The rows with the ratios of those that have the same label; rows of one label stand together."""
    labels = dict.fromkeys(label(row) for row in rows)
    grouped = [[row for row in rows if label(row) == wanted] for wanted in labels]
    return [_against(row, group, ours) for group in grouped for row in group]


def details_in_words(row: Row, columns: Mapping[str, tuple[str, int, str]]) -> dict[str, str]:
    """Those details that have a column: its name, digits and unit."""
    return {
        name: f"{row.details[detail]:,.{digits}f}{unit}"
        for detail, (name, digits, unit) in columns.items()
        if detail in row.details
    }


def ratios_in_words(row: Row) -> dict[str, str]:
    """By peer: 4.20×."""
    return {peer: f"{ratio:.2f}×" for peer, ratio in row.ratio_to.items()}


def _against(row: Row, group: Sequence[Row], ours: frozenset[str]) -> Row:
    if row.system not in ours or not row.ms:
        return row
    return replace(row, ratio_to={peer.system: peer.ms / row.ms for peer in group if peer.system not in ours})


def _row(bench: str, rounds: Sequence[Reading]) -> Row:
    first = rounds[0]
    names = dict.fromkeys(name for reading in rounds for name in reading.details)
    return Row(
        bench=bench,
        case=first.case,
        system=first.system,
        processes=first.processes,
        threads=first.threads,
        bytes=first.bytes,
        ms=statistics.median(ms for reading in rounds for ms in reading.ms),
        rounds_ms=tuple(statistics.median(reading.ms) for reading in rounds),
        details={
            name: statistics.median(reading.details[name] for reading in rounds if name in reading.details)
            for name in names
        },
    )
