"""The ray benchmark: the same jobs on a Ray cluster, whose nodes are all on this machine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.blocks import Blocks
from benchmarks.row import Row, details_in_words, ratios_in_words
from benchmarks.system import System, Turn

RAY = System("quorate-ray", "benchmarks.own.on_ray", is_ours=True)
LOCAL = System("quorate-local", "benchmarks.own.on_ray", is_ours=True)
TRACKED = System("quorate-ray-tracked", "benchmarks.own.on_ray", is_ours=True)
RAY_TRAIN = System("ray-train", "benchmarks.own.on_ray")

FIRST_STEP = "command to first step, 2 workers"
LOST = "one of 3 nodes killed"
JOINED = "another node added"
NODES = 4
METRICS = "step, metrics of every step"


@dataclass(frozen=True)
class OnRay:
    """Which rows are measured. A cluster is started for each, and ended with it."""

    rows: Sequence[str]
    workers: int = 64
    blocks: Blocks = field(default_factory=lambda: Blocks(120, 240))
    name: str = "ray"
    headline: str = (
        "Jobs on a Ray cluster, all of whose nodes are on this machine. A command is typed when the cluster is up; × "
        "is a peer's time divided by ours."
    )

    def turns(self) -> list[Turn]:
        """Every row that was asked for."""
        return [turn for row in self.rows for turn in ROWS[row](self)]

    def label(self, row: Row) -> str:
        """The case."""
        return row.case

    def explained(self, rows: Sequence[Row]) -> list[Row]:
        """With what Ray costs at the start, and what metrics cost in a step."""
        plain = {row.case: row.ms for row in rows if row.system == RAY.name}
        local = {row.case: row.ms for row in rows if row.system == LOCAL.name}
        return [_explained(row, plain, local) for row in rows]

    def remarks(self, row: Row) -> dict[str, str]:
        """What the targets are about."""
        return details_in_words(row, REMARKS) | ratios_in_words(row)

    # --- the rows

    def start(self) -> list[Turn]:
        """From the command to the first complete step."""
        return [_turn(system, "start", FIRST_STEP, workers=2) for system in (RAY, LOCAL, RAY_TRAIN)]

    def nodes(self) -> list[Turn]:
        """A node is killed, and another one added."""
        return [_turn(RAY, "nodes", LOST, added=JOINED, step_ms=50)]

    def crowd(self) -> list[Turn]:
        """Very many workers, of a model that takes no time."""
        return [_turn(RAY, "crowd", crowd_case(self.workers), workers=self.workers, nodes=NODES)]

    def metrics(self) -> list[Turn]:
        """Steps with metrics that are written as they come, and without."""
        lengths = {"warm_up": self.blocks.warm_up, "steps": self.blocks.steps}
        return [_turn(system, "metrics", METRICS, is_tracked=system is TRACKED, **lengths) for system in (RAY, TRACKED)]


ROWS: dict[str, Callable[[OnRay], list[Turn]]] = {
    "start": OnRay.start,
    "nodes": OnRay.nodes,
    "crowd": OnRay.crowd,
    "metrics": OnRay.metrics,
}

REMARKS = {
    "of_local": ("of local", 2, "×"),
    "beyond_step_ms": ("beyond a step", 0, " ms"),
    "launcher_mb": ("launcher", 0, " MB"),
    "coordinator_mb": ("coordinator", 0, " MB"),
    "slower_percent": ("slower", 1, " %"),
}
"""The details that people see: the name of the column, digits, unit."""


def crowd_case(workers: int) -> str:
    """64 workers on 4 nodes."""
    return f"{workers} workers on {NODES} nodes"


def _turn(system: System, row: str, case: str, **order: Any) -> Turn:
    return Turn(system, case, {"row": row, "system": system.name, "case": case, **order})


def _explained(row: Row, plain: dict[str, float], local: dict[str, float]) -> Row:
    if row.system == RAY.name and row.case in local:
        return row.with_details(of_local=row.ms / local[row.case])
    if row.system == TRACKED.name and row.case in plain:
        return row.with_details(slower_percent=100 * (row.ms / plain[row.case] - 1))
    return row
