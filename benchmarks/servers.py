"""The benchmark of parameter servers: what they cost, what they gain with a slow worker, and what a loss costs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.allreduce import repeats_for
from benchmarks.row import Row, ratios_in_words
from benchmarks.script import LIMIT
from benchmarks.size import UNITS
from benchmarks.system import Needs, System, Turn

SHM = System("quorate-shm", "benchmarks.own.push_pull", is_ours=True)
TCP = System("quorate-tcp", "benchmarks.own.push_pull", is_ours=True)
RING = System("quorate-ring", "benchmarks.own.allreduce", is_ours=True)
GRPC = System("grpc", "benchmarks.peers.grpc_push_pull", needs=Needs(("grpcio",)))
MODES = tuple(
    System(f"quorate-{mode}", "benchmarks.own.slowed", is_ours=True)
    for mode in ("synchronous", "bounded", "asynchronous")
)
LOSSES = System("quorate-killed", "benchmarks.own.server_losses", is_ours=True)
SPARSE = System("quorate-sparse", "benchmarks.own.embedding", is_ours=True)
DENSE = System("quorate-dense", "benchmarks.own.embedding", is_ours=True)
SYSTEMS = (SHM, TCP, RING, GRPC, *MODES, LOSSES, SPARSE, DENSE)
LINKS = {SHM: "shm", TCP: "tcp", RING: "shm"}

SLOWED = "one of 4 workers slowed 4×"
SLOWED_STEPS = 60
WORKER_KILLED, SERVER_KILLED, COORDINATOR_KILLED = "killed: a worker", "killed: a server", "killed: the coordinator"
TABLE = "table of 1,000,000 × 64"


@dataclass(frozen=True)
class Servers:
    """Which sizes a worker sends to its server and gets back, and how long the other measurements last."""

    sizes: Sequence[int] = (UNITS["MB"], 25 * UNITS["MB"])
    systems: Sequence[System] = SYSTEMS
    repeats: int | None = None
    steps: int = SLOWED_STEPS
    kills: int = 2
    rows: int = 1_000_000
    name: str = "servers"
    headline: str = (
        "Push and pull: from a gradient in a worker to new values there, by way of a server without an optimizer; "
        "quorate-ring is the all-reduce of two workers. Slowed: all samples of a job. Killed: the longest pause "
        "between two steps. Table: a step over TCP that touches 1 % of the rows. × is another's time divided by ours."
    )

    def turns(self) -> list[Turn]:
        """Each system once."""
        return [self._turn(system) for system in self.systems]

    def label(self, row: Row) -> str:
        """25 MB, or what else was measured."""
        return row.case

    def explained(self, rows: Sequence[Row]) -> list[Row]:
        """Each against the one that it is measured by: the ring, the synchronous mode, the dense table."""
        found = {(row.system, row.case): row for row in rows}
        return [self._explained(row, found) for row in rows]

    def remarks(self, row: Row) -> dict[str, str]:
        """How the others compare."""
        words = {"of ring": "of_ring", "faster": "faster", "fewer bytes": "fewer_bytes"}
        against = {word: f"{row.details[name]:.2f}×" for word, name in words.items() if name in row.details}
        worst = {"worst": f"{row.details['worst_ms']:,.0f} ms"} if "worst_ms" in row.details else {}
        peers = ratios_in_words(row) if row.system in (SHM.name, TCP.name) else {}
        return against | worst | peers

    def _explained(self, row: Row, found: dict[tuple[str, str], Row]) -> Row:
        ring = found.get((RING.name, row.case))
        if row.system in (SHM.name, TCP.name) and ring is not None:
            return row.with_details(of_ring=ring.ms / row.ms)
        synchronous = found.get((MODES[0].name, row.case))
        if row.system in [mode.name for mode in MODES[1:]] and synchronous is not None:
            return row.with_details(faster=synchronous.ms / row.ms)
        dense = found.get((DENSE.name, row.case))
        if row.system == SPARSE.name and dense is not None:
            return row.with_details(faster=dense.ms / row.ms, fewer_bytes=_bytes(dense) / _bytes(row))
        return row

    def _turn(self, system: System) -> Turn:
        if system in MODES:
            mode = system.name.removeprefix("quorate-")
            times = {"steps": self.steps, "lane_ms": 40, "factor": 4, "staleness": 4}
            return Turn(system, SLOWED, {"case": SLOWED, "processes": 4, "mode": mode, **times})
        if system == LOSSES:
            return Turn(system, "kills", {"processes": 3, "servers": 3, "step_ms": 50, "kills": self.kills})
        if system in (SPARSE, DENSE):
            is_sparse = system == SPARSE
            shape = {"rows": self.rows, "width": 64, "touched": self.rows // 100}
            table = {"case": TABLE, "sparse": is_sparse, "steps": 20 if is_sparse else 5, "limit": LIMIT, **shape}
            return Turn(system, TABLE, table)
        order: dict[str, Any] = {
            "processes": 2,
            "sizes": list(self.sizes),
            "repeats": [self.repeats or repeats_for(size) for size in self.sizes],
            "links": LINKS.get(system),
            "limit": LIMIT,
        }
        return Turn(system, "a worker and a server" if system != RING else "2 workers", order)


def _bytes(row: Row) -> float:
    return row.details["sent_bytes"] + row.details["received_bytes"]
