"""The benchmark of parameter servers: a gradient to a server and new values back, without an optimizer."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.allreduce import repeats_for
from benchmarks.row import Row, ratios_in_words
from benchmarks.script import LIMIT
from benchmarks.size import UNITS
from benchmarks.system import Needs, System, Turn

SHM = System("quorate-shm", "benchmarks.own.push_pull", is_ours=True)
TCP = System("quorate-tcp", "benchmarks.own.push_pull", is_ours=True)
RING = System("quorate-ring", "benchmarks.own.allreduce", is_ours=True)
GRPC = System("grpc", "benchmarks.peers.grpc_push_pull", needs=Needs(("grpcio",)))
SYSTEMS = (SHM, TCP, RING, GRPC)
LINKS = {SHM: "shm", TCP: "tcp", RING: "shm"}


@dataclass(frozen=True)
class Servers:
    """Which sizes a worker sends to its server and gets back."""

    sizes: Sequence[int] = (UNITS["MB"], 25 * UNITS["MB"])
    systems: Sequence[System] = SYSTEMS
    repeats: int | None = None
    name: str = "servers"
    headline: str = (
        "From a gradient in a worker to its new values there, by way of a server that has no optimizer. quorate-ring "
        "is the all-reduce of two workers in shared memory. × is a peer's time divided by ours."
    )

    def turns(self) -> list[Turn]:
        """Each system; one turn exchanges all sizes."""
        return [self._turn(system) for system in self.systems]

    def label(self, row: Row) -> str:
        """25 MB."""
        return row.case

    def explained(self, rows: Sequence[Row]) -> list[Row]:
        """With the speed of the ring's all-reduce as the measure: 1 is as fast."""
        ring = {row.case: row.ms for row in rows if row.system == RING.name}
        return [
            row.with_details(of_ring=ring[row.case] / row.ms) if row.case in ring and row.system in _SERVED else row
            for row in rows
        ]

    def remarks(self, row: Row) -> dict[str, str]:
        """The ring, and how the peers compare."""
        of_ring = {"of ring": f"{row.details['of_ring']:.2f}×"} if "of_ring" in row.details else {}
        return of_ring | (ratios_in_words(row) if row.system in _SERVED else {})

    def _turn(self, system: System) -> Turn:
        order = {
            "processes": 2,
            "sizes": list(self.sizes),
            "repeats": [self.repeats or repeats_for(size) for size in self.sizes],
            "links": LINKS.get(system),
            "limit": LIMIT,
        }
        return Turn(system, "a worker and a server" if system != RING else "2 workers", order)


_SERVED = (SHM.name, TCP.name)
