"""The scaling benchmark: the same job on more and more workers."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.row import Row
from benchmarks.selection import Crowd
from benchmarks.system import System, Turn
from quorate.core.errors import RequestError

QUORATE = System("quorate", "benchmarks.own.scaling", is_ours=True)
DDP = System("ddp-gloo", "benchmarks.peers.ddp_scaling")
CEILING = System("no-exchange", "benchmarks.peers.no_exchange_scaling")
SYSTEMS = (QUORATE, DDP, CEILING)

CASE = "cnn"
MICRO_BATCH = 32
WARM_UP = 3
STEPS_PER_WORKER = 12


@dataclass(frozen=True)
class Scaling:
    """Which numbers of workers train; the batch depends on the lanes only, so that all train the same."""

    crowds: Sequence[Crowd]
    lanes: int = 8
    systems: Sequence[System] = SYSTEMS
    steps_per_worker: int = STEPS_PER_WORKER
    name: str = "scaling"
    headline: str = (
        "The step of a small CNN on more and more workers, with the same global batch. Efficiency is against one "
        "worker, ceiling against the same processes without exchange; exchange is its share of a step."
    )

    def __post_init__(self) -> None:
        most = max(crowd.processes for crowd in self.crowds)
        if most > self.lanes:
            raise RequestError(
                f"--workers: {most} workers cannot host {self.lanes} lanes. Give at most {self.lanes}, or more --lanes."
            )

    @property
    def batch_size(self) -> int:
        """Samples in a global batch."""
        return MICRO_BATCH * self.lanes

    def turns(self) -> list[Turn]:
        """Each system with each number of workers; more workers take more steps in the same time."""
        return [
            Turn(
                system,
                crowd_in_words(crowd.processes, crowd.threads),
                {
                    "case": CASE,
                    "processes": crowd.processes,
                    "threads": crowd.threads,
                    "lanes": self.lanes,
                    "batch_size": self.batch_size,
                    "warm_up": WARM_UP,
                    "steps": self.steps_per_worker * crowd.processes,
                },
            )
            for crowd in self.crowds
            for system in self.systems
        ]

    def label(self, row: Row) -> str:
        """4 workers."""
        return crowd_in_words(row.processes, row.threads)

    def explained(self, rows: Sequence[Row]) -> list[Row]:
        """With speed, efficiency against one worker, share of the ceiling, and share of the exchange."""
        singles = {(row.system, row.threads): row.ms for row in rows if row.processes == 1}
        ceilings = {(row.processes, row.threads): row.ms for row in rows if row.system == CEILING.name}
        return [
            self._explained(row, singles.get((row.system, row.threads)), ceilings.get((row.processes, row.threads)))
            for row in rows
        ]

    def remarks(self, row: Row) -> dict[str, str]:
        """Speed, and the shares in percent."""
        shares = {name: row.details.get(f"{name}_percent") for name in ("efficiency", "ceiling", "exchange")}
        speed = {"samples/s": f"{row.details['samples_per_second']:,.0f}"}
        return speed | {name: f"{share:.1f} %" for name, share in shares.items() if share is not None}

    def _explained(self, row: Row, single: float | None, ceiling: float | None) -> Row:
        details = {"samples_per_second": self.batch_size / row.ms * 1000}
        if single is not None:
            details["efficiency_percent"] = single / (row.processes * row.ms) * 100
        if ceiling is not None and row.system != CEILING.name:
            details["ceiling_percent"] = ceiling / row.ms * 100
        if "exchange_ms" in row.details:
            details["exchange_percent"] = row.details["exchange_ms"] / row.details["mean_ms"] * 100
        return row.with_details(**details)


def crowd_in_words(workers: int, threads: int) -> str:
    """4 workers, or 4 × 2 threads."""
    if threads > 1:
        return f"{workers} × {threads} threads"
    return f"{workers} worker{'s' if workers != 1 else ''}"
