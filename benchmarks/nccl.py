"""The collectives of NCCL and Gloo, beside our all-reduce: by size, with what they take of a step."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.allreduce import SHM, repeats_for
from benchmarks.row import Row, ratios_in_words
from benchmarks.script import LIMIT
from benchmarks.system import System, Turn
from quorate.core.errors import RequestError
from quorate.core.gpus import gpus_here

NCCL = System("nccl", "benchmarks.peers.collectives")
GLOO = System("gloo", "benchmarks.peers.collectives")
SYSTEMS = (SHM, GLOO, NCCL)
ALL_REDUCE = "all_reduce"
COLLECTIVES = (ALL_REDUCE, "all_gather", "reduce_scatter", "broadcast")
LATENCY = 4
"""Bytes of the smallest exchange: what it takes is what any takes at least."""


@dataclass(frozen=True)
class Nccl:
    """Which sizes are exchanged. NCCL takes a process for each GPU, the others as many, and two at least."""

    sizes: Sequence[int]
    systems: Sequence[System] = SYSTEMS
    repeats: int | None = None
    gpus: int = 0
    name: str = "nccl"

    @classmethod
    def here(cls, sizes: Sequence[int], systems: Sequence[System], repeats: int | None) -> "Nccl":
        """With the GPUs of this machine."""
        bench = cls(sizes, systems, repeats, len(gpus_here()))
        if not bench.turns():
            raise RequestError("This machine has no GPU, and NCCL needs one. Without --systems, Gloo is measured.")
        return bench

    @property
    def headline(self) -> str:
        """What is measured, and what cannot be here."""
        what = "A tensor of each size by each collective; × is a peer's time divided by ours, where sums are formed."
        if self.gpus > 1:
            return f"{what} NCCL on {self.gpus} GPUs."
        if self.gpus == 1:
            return f"{what} One GPU here: NCCL has nobody to exchange with, and what is measured is a call of it."
        return f"{what} No GPU here: NCCL is not measured, and Gloo takes its place."

    def turns(self) -> list[Turn]:
        """One turn of a system exchanges all sizes by all collectives."""
        crowd = max(2, self.gpus)
        processes = {SHM: crowd, GLOO: crowd, NCCL: self.gpus}
        return [self._turn(system, processes[system]) for system in self.systems if processes[system]]

    def label(self, row: Row) -> str:
        """2 processes, all_reduce, 25 MB."""
        kind, _, size = row.case.rpartition(", ")
        return f"{row.processes} process{'es' if row.processes > 1 else ''}, {kind or ALL_REDUCE}, {size}"

    def explained(self, rows: Sequence[Row]) -> list[Row]:
        """With bandwidths as nccl-tests counts them: what each process must send at least, by the time it takes."""
        return [_with_bandwidth(row) for row in rows]

    def remarks(self, row: Row) -> dict[str, str]:
        """Bandwidth, and what an all-reduce would be of a step."""
        told = {"GB/s": f"{row.details['gb_per_second']:.2f}"} if "gb_per_second" in row.details else {}
        if "step_percent" in row.details:
            told["of a step"] = f"{row.details['step_percent']:.0f} %"
        return told | ratios_in_words(row)

    def _turn(self, system: System, processes: int) -> Turn:
        sizes = [LATENCY, *self.sizes]
        order = {
            "processes": processes,
            "sizes": sizes,
            "repeats": [self.repeats or repeats_for(size) for size in sizes],
            "links": "shm" if system == SHM else None,
            "limit": LIMIT,
            "backend": system.name,
            "collectives": COLLECTIVES,
        }
        return Turn(system, f"{processes} process{'es' if processes > 1 else ''}", order)


def _with_bandwidth(row: Row) -> Row:
    if row.bytes is None or row.bytes <= LATENCY or not row.ms:
        return row
    kind, others = row.case.rpartition(", ")[0] or ALL_REDUCE, row.processes - 1
    # Of a process that is alone nothing is sent: then it is what passes through a call.
    share = {ALL_REDUCE: 2 * others / row.processes, "broadcast": 1.0}.get(kind, others / row.processes) or 1.0
    return row.with_details(gb_per_second=share * row.bytes / row.ms / 1e6)
