"""All that a benchmark has found, for programs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.machine import Machine
from benchmarks.row import Row
from benchmarks.system import Absence
from benchmarks.target import Judgement


@dataclass(frozen=True)
class Line:
    """A row as people see it: with the name of its case, and remarks by the names of their columns."""

    row: Row
    label: str
    remarks: Mapping[str, str]


@dataclass(frozen=True)
class Report:
    """How it went. `stopped` is the word for the signal that ended it early, with the exit code that belongs to it."""

    bench: str
    headline: str
    machine: Machine
    rounds: int
    lines: Sequence[Line]
    absences: Sequence[Absence]
    judgements: Sequence[Judgement]
    stopped: tuple[str, int] | None = None

    @property
    def status(self) -> str:
        """complete, failed if a part of Quorate itself could not be measured, or why it ended early."""
        if self.stopped is not None:
            return self.stopped[0]
        return "failed" if any(absence.is_ours for absence in self.absences) else "complete"

    @property
    def exit_code(self) -> int:
        """A peer that is missing is no failure: it is told."""
        if self.stopped is not None:
            return self.stopped[1]
        return 1 if self.status == "failed" else 0

    def to_document(self) -> dict[str, Any]:
        """As one JSON document."""
        return {
            "bench": self.bench,
            "status": self.status,
            "exit_code": self.exit_code,
            "machine": asdict(self.machine),
            "rounds": self.rounds,
            "rows": [line.row.to_dict() for line in self.lines],
            "not_measured": [
                {"what": absence.what, "reason": absence.reason, "command": absence.command or None}
                for absence in self.absences
            ],
            "targets": [judgement.to_dict() for judgement in self.judgements],
        }
