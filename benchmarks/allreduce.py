"""The all-reduce benchmark: sums of gradients among processes of one host."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.interpreters import MPIRUN, mpirun, mpirun_version
from benchmarks.row import Row, ratios_in_words
from benchmarks.script import LIMIT
from benchmarks.system import Needs, System, Turn
from quorate.core.errors import RequestError

SHM = System("quorate-shm", "benchmarks.own.allreduce", is_ours=True)
TCP = System("quorate-tcp", "benchmarks.own.allreduce", is_ours=True)
GLOO = System("gloo", "benchmarks.peers.gloo_allreduce")
OPENMPI = System("openmpi", "benchmarks.peers.openmpi_allreduce", needs=Needs(("mpi4py", "numpy"), (MPIRUN,)))
SYSTEMS = (SHM, TCP, GLOO, OPENMPI)
LINKS = {SHM: "shm", TCP: "tcp"}

VOLUME = 500 * 2**20
"""Bytes that are exchanged for each size in a round, within these limits of repetitions."""
FEWEST, MOST = 8, 200


def check_processes(counts: Sequence[int]) -> Sequence[int]:
    """One process alone has nothing to exchange."""
    if 1 in counts:
        raise RequestError("--processes: 1 process has nobody to exchange with. Give 2 or more.")
    return counts


def repeats_for(size: int) -> int:
    """How often a gradient of this size is exchanged in a round."""
    return max(FEWEST, min(MOST, VOLUME // size))


@dataclass(frozen=True)
class AllReduce:
    """Which processes exchange which sizes how often; without `repeats`, large gradients are exchanged less often."""

    processes: Sequence[int]
    sizes: Sequence[int]
    systems: Sequence[System] = SYSTEMS
    repeats: int | None = None
    mpi_version: str = field(default_factory=mpirun_version)
    name: str = "allreduce"
    headline: str = (
        "From a gradient in each process to their sum, readable in each. × is a peer's time divided by ours."
    )

    def turns(self) -> list[Turn]:
        """Each system with each number of processes; one turn exchanges all sizes."""
        return [self._turn(system, processes) for processes in self.processes for system in self.systems]

    def label(self, row: Row) -> str:
        """2 processes, 25 MB."""
        return f"{_processes(row.processes)}, {row.case}"

    def explained(self, rows: Sequence[Row]) -> list[Row]:
        """The ratios say it all."""
        return list(rows)

    def remarks(self, row: Row) -> dict[str, str]:
        """How the peers compare."""
        return ratios_in_words(row)

    def _turn(self, system: System, processes: int) -> Turn:
        order = {
            "processes": processes,
            "sizes": list(self.sizes),
            "repeats": [self.repeats or repeats_for(size) for size in self.sizes],
            "links": LINKS.get(system),
            "limit": LIMIT,
        }
        prefix = mpirun(processes, self.mpi_version) if system == OPENMPI else ()
        return Turn(system, _processes(processes), order, prefix)


def _processes(count: int) -> str:
    return f"{count} processes" if count != 1 else "1 process"
