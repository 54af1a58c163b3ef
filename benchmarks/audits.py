"""The audits benchmark: what a step costs more where lanes are audited, and where their digests are recorded."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.blocks import Blocks
from benchmarks.row import Row
from benchmarks.system import System, Turn

NOTHING = System("unaudited", "benchmarks.own.audits", is_ours=True)
AUDITED = System("audited", "benchmarks.own.audits", is_ours=True)
RECORDED = System("recorded", "benchmarks.own.audits", is_ours=True)
SYSTEMS = (NOTHING, AUDITED, RECORDED)
LANES = 8
LENGTH = Blocks(50, 500)
"""With 8 lanes one of 25 steps has an audit: each block has two."""


@dataclass(frozen=True)
class Audits:
    """The same job with neither, with audits as they are by default, and with the digests of all lanes."""

    systems: Sequence[System] = SYSTEMS
    workers: Sequence[int] = (1, 2)
    length: Blocks = LENGTH
    name: str = "audits"
    headline: str = "Wall time of a training step of a CNN, and what audits and recorded digests add to it."

    def turns(self) -> list[Turn]:
        """Each system on one and on several workers, one after the other in each round."""
        return [
            Turn(
                system,
                "cnn",
                {
                    "case": "cnn",
                    "lanes": LANES,
                    "processes": workers,
                    "warm_up": self.length.warm_up,
                    "steps": self.length.steps,
                    "every": 200 if system is AUDITED else 0,
                    "record": "lanes" if system is RECORDED else None,
                },
            )
            for workers in self.workers
            for system in self.systems
        ]

    def label(self, row: Row) -> str:
        """The case, and on how many workers."""
        return f"{row.case}, {row.processes} worker{'s' if row.processes > 1 else ''}"

    def explained(self, rows: Sequence[Row]) -> list[Row]:
        """With what each costs: the median over rounds, in each of which they have taken turns."""
        plain = {row.processes: row for row in rows if row.system == NOTHING.name}
        return [_with_cost(row, plain.get(row.processes)) for row in rows]

    def remarks(self, row: Row) -> dict[str, str]:
        """The cost."""
        return {"cost": f"{row.details['cost_percent']:+.2f} %"} if "cost_percent" in row.details else {}


def _with_cost(row: Row, plain: Row | None) -> Row:
    if plain is None or row.system == NOTHING.name:
        return row
    costs = [own / other - 1 for own, other in zip(row.rounds_ms, plain.rounds_ms, strict=False)]
    return row.with_details(cost_percent=statistics.median(costs or [row.ms / plain.ms - 1]) * 100)
