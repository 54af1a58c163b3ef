"""The ddp benchmark: `strategy: ddp` against DistributedDataParallel, in a step and after the death of a worker."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.blocks import Blocks
from benchmarks.recovery import STEP_MS
from benchmarks.row import Row, ratios_in_words
from benchmarks.system import System, Turn

STEP, KILLED = "cnn", "killed"
PROCESSES = 2
MICRO_BATCH = 32
BLOCKS = Blocks(20, 200)

QUORATE = System("quorate", "benchmarks.own.scaling", is_ours=True)
DDP = System("ddp-gloo", "benchmarks.peers.ddp_scaling")
# One stopwatch starts the commands of both, and kills their workers.
HURT = System("quorate-ddp", "benchmarks.own.recovery", is_ours=True)
TORCHRUN = System("torchrun", "benchmarks.own.recovery")
SYSTEMS = (QUORATE, DDP, HURT, TORCHRUN)


@dataclass(frozen=True)
class Ddp:
    """For how many steps, and how often a worker of each is killed."""

    systems: Sequence[System] = SYSTEMS
    blocks: Blocks = BLOCKS
    kills: int = 5
    name: str = "ddp"
    headline: str = (
        "Two workers with `strategy: ddp` over Gloo: the step of a small CNN against DistributedDataParallel, and the "
        "time from `kill -9` of a worker to the next step. Torchrun restarts all from what the last step has saved."
    )

    def turns(self) -> list[Turn]:
        """Steps and kills in turns."""
        step = {
            "case": STEP,
            "processes": PROCESSES,
            "threads": 1,
            "lanes": PROCESSES,
            "batch_size": MICRO_BATCH * PROCESSES,
            "warm_up": self.blocks.warm_up,
            "steps": self.blocks.steps,
            "strategy": "ddp",
        }
        orders = {QUORATE.name: step, DDP.name: step}
        kills = {HURT.name: self.kills, TORCHRUN.name: 1}
        for system, count in kills.items():
            orders[system] = {"system": system, "processes": PROCESSES, "step_ms": STEP_MS, "kills": count}
        return [Turn(each, STEP if each.name not in kills else KILLED, orders[each.name]) for each in self.systems]

    def label(self, row: Row) -> str:
        """What is measured."""
        return STEP if row.system in (QUORATE.name, DDP.name) else KILLED

    def explained(self, rows: Sequence[Row]) -> list[Row]:
        """With what our step takes more than theirs."""
        plain = next((row.ms for row in rows if row.system == DDP.name), None)
        return [
            row.with_details(slower_percent=(row.ms / plain - 1) * 100) if plain and row.system == QUORATE.name else row
            for row in rows
        ]

    def remarks(self, row: Row) -> dict[str, str]:
        """What ours takes more, the steps that are done again, and how the peers compare."""
        slower, again = row.details.get("slower_percent"), row.details.get("steps_lost")
        return {
            **({} if slower is None else {"slower": f"{slower:+.1f} %"}),
            **({} if again is None else {"steps lost": f"{again:.0f}"}),
            **ratios_in_words(row),
        }
