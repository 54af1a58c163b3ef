"""The step benchmark: what a loop costs over one that is written by hand."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.blocks import Blocks
from benchmarks.row import Row
from benchmarks.system import Needs, System, Turn
from quorate.engines.local import ALLOCATOR

QUORATE = System("quorate", "benchmarks.own.step", is_ours=True)
OWN_LOOP = System("quorate-own-loop", "benchmarks.own.step", is_ours=True)
HAND_WRITTEN = System("hand-written", "benchmarks.peers.hand_written_step")
# The same loop with the allocator's settings that our workers have: the best that somebody can write.
HAND_TUNED = System("hand-tuned", "benchmarks.peers.hand_written_step")
FABRIC = System("fabric", "benchmarks.peers.fabric_step", needs=Needs(("lightning", "torch")))
ACCELERATE = System("accelerate", "benchmarks.peers.accelerate_step", needs=Needs(("accelerate", "torch")))
LIGHTNING = System("lightning", "benchmarks.peers.lightning_step", needs=Needs(("lightning", "torch")))
SYSTEMS = (QUORATE, OWN_LOOP, HAND_WRITTEN, HAND_TUNED, FABRIC, ACCELERATE, LIGHTNING)

BY_HAND = (HAND_WRITTEN.name, HAND_TUNED.name)
PREFIXES = {HAND_TUNED.name: ("env", *(f"{name}={value}" for name, value in ALLOCATOR.items()))}

LENGTHS = {"tiny-mlp": Blocks(200, 2000), "cnn": Blocks(10, 100)}


@dataclass(frozen=True)
class Step:
    """Which loops train which cases, and for how long."""

    systems: Sequence[System] = SYSTEMS
    lengths: dict[str, Blocks] = field(default_factory=lambda: dict(LENGTHS))
    name: str = "step"
    headline: str = "Wall time of a training step, and what it costs over a hand-written loop."

    def turns(self) -> list[Turn]:
        """Each system with each case."""
        return [
            Turn(
                system,
                case,
                {"system": system.name, "case": case, "warm_up": length.warm_up, "steps": length.steps},
                PREFIXES.get(system.name, ()),
            )
            for case, length in self.lengths.items()
            for system in self.systems
        ]

    def label(self, row: Row) -> str:
        """The case."""
        return row.case

    def explained(self, rows: Sequence[Row]) -> list[Row]:
        """With the overhead over the faster hand-written loop, and that of a loop of one's own over a task."""
        by_hand = {case: min(found) for case in self.lengths if (found := _by_hand(rows, case))}
        by_task = {row.case: row for row in rows if row.system == QUORATE.name}
        return [_with_turns(_with_overhead(row, by_hand.get(row.case)), by_task.get(row.case)) for row in rows]

    def remarks(self, row: Row) -> dict[str, str]:
        """The overhead."""
        details = row.details
        remarks: dict[str, str] = {}
        if "overhead_us" in details:
            remarks |= {
                "overhead": f"{details['overhead_us']:+,.0f} µs",
                "relative": f"{details['overhead_percent']:+.1f} %",
            }
        if "over_task_us" in details:
            remarks["over a task"] = f"{details['over_task_us']:+,.0f} µs"
        return remarks


def _by_hand(rows: Sequence[Row], case: str) -> list[float]:
    return [row.ms for row in rows if row.case == case and row.system in BY_HAND]


def _with_turns(row: Row, by_task: Row | None) -> Row:
    """The two take turns, so that each round has a difference of its own: what slows down a round is in both."""
    if by_task is None or row.system != OWN_LOOP.name:
        return row
    differences = [own - task for own, task in zip(row.rounds_ms, by_task.rounds_ms, strict=False)]
    return row.with_details(over_task_us=statistics.median(differences or [row.ms - by_task.ms]) * 1000)


def _with_overhead(row: Row, base: float | None) -> Row:
    if not base or row.system in BY_HAND:
        return row
    return row.with_details(overhead_us=(row.ms - base) * 1000, overhead_percent=(row.ms / base - 1) * 100)
