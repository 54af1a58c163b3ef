"""The recovery benchmark: from the death of a worker to the next step that the others complete."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.row import Row, ratios_in_words
from benchmarks.system import System, Turn

# One stopwatch starts the commands of both, and kills their workers.
QUORATE = System("quorate", "benchmarks.own.recovery", is_ours=True)
TORCHRUN = System("torchrun", "benchmarks.own.recovery")
SYSTEMS = (QUORATE, TORCHRUN)

STEP_MS = 50
FAULT_EVERY_S = 30
KILLS = {QUORATE.name: 7, TORCHRUN.name: 1}


@dataclass(frozen=True)
class Recovery:
    """How many workers train while one of them is killed, again and again."""

    processes: Sequence[int] = (2, 3, 4)
    systems: Sequence[System] = SYSTEMS
    name: str = "recovery"
    headline: str = (
        "From `kill -9` of a worker, at a moment anywhere in a step of 50 ms, to the first step that is completed "
        "without it. Redo is what that step takes with the lanes taken over; back is when the worker is replaced. Lost "
        f"is the time without progress for each kill, available what that leaves with one every {FAULT_EVERY_S} s."
    )

    def turns(self) -> list[Turn]:
        """Each system with each number of workers."""
        return [
            Turn(
                system,
                f"{processes} workers",
                {"system": system.name, "processes": processes, "step_ms": STEP_MS, "kills": KILLS[system.name]},
            )
            for processes in self.processes
            for system in self.systems
        ]

    def label(self, row: Row) -> str:
        """3 workers."""
        return row.case

    def explained(self, rows: Sequence[Row]) -> list[Row]:
        """With what is left when the redone step is taken off, and what that amounts to over a longer time."""
        return [
            row.with_details(
                beyond_redo_ms=row.ms - row.details["redo_ms"],
                available_percent=100 * (1 - row.details["lost_ms"] / (1000 * FAULT_EVERY_S)),
            )
            for row in rows
        ]

    def remarks(self, row: Row) -> dict[str, str]:
        """The redone step, what comes on top of it, the replacement, and how the peers compare."""
        back = {"back": f"{row.details['back_ms']:,.0f} ms"} if "back_ms" in row.details else {}
        return {
            "redo": f"{row.details['redo_ms']:,.0f} ms",
            "beyond": f"{row.details['beyond_redo_ms']:,.0f} ms",
            **back,
            "lost": f"{row.details['lost_ms']:,.0f} ms",
            "available": f"{row.details['available_percent']:.1f} %",
            **ratios_in_words(row),
        }
