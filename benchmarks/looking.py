"""The looking benchmark: how soon the commands that look at runs show a very long one, and in how much memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.row import Row
from benchmarks.system import System, Turn

STEPS = 1_000_000
QUORATE = System("quorate", "benchmarks.own.looking", is_ours=True)


@dataclass(frozen=True)
class Looking:
    """Each command once, at a run that has its index."""

    steps: int = STEPS
    systems: Sequence[System] = (QUORATE,)
    name: str = "looking"
    headline: str = "Wall time of the commands that look at a long run."

    def turns(self) -> list[Turn]:
        """One: to write the run takes longest."""
        return [Turn(QUORATE, f"{self.steps:,} steps", {"steps": self.steps})]

    def label(self, row: Row) -> str:
        """The command."""
        return row.case

    def explained(self, rows: Sequence[Row]) -> list[Row]:
        """With the time in seconds, as its target has it."""
        return [row.with_details(seconds=row.ms / 1000) for row in rows]

    def remarks(self, row: Row) -> dict[str, str]:
        """Processor time and memory."""
        return {"processor": f"{row.details['busy_s']:.1f} s", "memory": f"{row.details['peak_mb']:,.0f} MB"}
