"""The sharded benchmark: what saving a state costs a training of which each worker holds a part."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.row import Row, ratios_in_words
from benchmarks.size import size_in_words
from benchmarks.system import System, Turn

QUORATE = System("quorate-fsdp", "benchmarks.own.sharded_checkpoint", is_ours=True)
DCP_STAGER = System("dcp-async-stager", "benchmarks.peers.dcp_sharded_checkpoint")
SYSTEMS = (QUORATE, DCP_STAGER)
WAITED = "waited for a save"
PROCESSES = 2
EVERY = 8
"""Steps between two saves: long enough for one to end."""


@dataclass(frozen=True)
class Sharded:
    """How large the state is, and how many saves count."""

    size: int = 2**30
    saves: int = 4
    systems: Sequence[System] = SYSTEMS
    name: str = "sharded"
    headline: str = (
        "Two workers train with FSDP2 and save while they go on. Waited is what training stands still for a save, in "
        "the worker that waits longest; the largest share is that of the bytes which one worker has written."
    )

    def turns(self) -> list[Turn]:
        """Each once."""
        order = {"size": self.size, "saves": self.saves, "every": EVERY, "processes": PROCESSES}
        return [Turn(system, size_in_words(self.size), order) for system in self.systems]

    def label(self, row: Row) -> str:
        """1 GB: waited for a save."""
        return f"{size_in_words(row.bytes or 0)}: {row.case}"

    def explained(self, rows: Sequence[Row]) -> list[Row]:
        """They speak for themselves."""
        return list(rows)

    def remarks(self, row: Row) -> dict[str, str]:
        """The share of one worker, and how the peer compares."""
        share = row.details.get("largest_share_percent")
        return {**({} if share is None else {"largest share": f"{share:.0f} %"}), **ratios_in_words(row)}
