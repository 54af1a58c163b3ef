"""The tracking benchmark: what a step costs more where every sink is switched on."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.blocks import Blocks
from benchmarks.row import Row
from benchmarks.system import System, Turn

NOTHING = System("untracked", "benchmarks.own.tracking", is_ours=True)
EVERYTHING = System("tracked", "benchmarks.own.tracking", is_ours=True)
SYSTEMS = (NOTHING, EVERYTHING)

# The process that tracks imports its libraries for some seconds: what counts are the steps after that.
LENGTHS = {"tiny-mlp": (32, Blocks(6000, 6000)), "cnn": (24, Blocks(240, 240))}
"""Of each case the samples in a batch, and the steps. A step of the second takes about 50 ms."""


@dataclass(frozen=True)
class Tracking:
    """The same jobs of one worker, with nothing and with everything switched on."""

    systems: Sequence[System] = SYSTEMS
    name: str = "tracking"
    headline: str = "Wall time of a training step, and what it costs more with all sinks on."

    def turns(self) -> list[Turn]:
        """Each system with each case."""
        return [
            Turn(
                system,
                case,
                {
                    "case": case,
                    "batch_size": batch_size,
                    "warm_up": length.warm_up,
                    "steps": length.steps,
                    "is_tracked": system is EVERYTHING,
                },
            )
            for case, (batch_size, length) in LENGTHS.items()
            for system in self.systems
        ]

    def label(self, row: Row) -> str:
        """The case."""
        return row.case

    def explained(self, rows: Sequence[Row]) -> list[Row]:
        """With what tracking costs, where both were measured."""
        plain = {row.case: row.ms for row in rows if row.system == NOTHING.name}
        return [_with_cost(row, plain.get(row.case)) for row in rows]

    def remarks(self, row: Row) -> dict[str, str]:
        """The cost."""
        if "cost_us" not in row.details:
            return {}
        return {"cost": f"{row.details['cost_us']:+,.0f} µs", "relative": f"{row.details['cost_percent']:+.1f} %"}


def _with_cost(row: Row, plain: float | None) -> Row:
    if not plain or row.system == NOTHING.name:
        return row
    return row.with_details(cost_us=(row.ms - plain) * 1000, cost_percent=(row.ms / plain - 1) * 100)
