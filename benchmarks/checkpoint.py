"""The checkpoint benchmark: what saving a large state costs a training, and how soon it is safe and loaded again."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.row import Row
from benchmarks.saves import ADDED, RAW
from benchmarks.size import size_in_words
from benchmarks.system import System, Turn
from quorate.core.errors import RequestError

QUORATE = System("quorate", "benchmarks.own.checkpoint", is_ours=True)
TORCH_SAVE = System("torch-save", "benchmarks.peers.torch_save_checkpoint")
DCP = System("dcp", "benchmarks.peers.dcp_checkpoint")
DCP_ASYNC = System("dcp-async", "benchmarks.peers.dcp_async_checkpoint")
DCP_STAGER = System("dcp-async-stager", "benchmarks.peers.dcp_stager_checkpoint")
SAFETENSORS = System("safetensors", "benchmarks.peers.safetensors_checkpoint")
SYSTEMS = (QUORATE, TORCH_SAVE, DCP, DCP_ASYNC, DCP_STAGER, SAFETENSORS)
RAW_DISK = System(RAW, "")
"""The floor, which every script measures beside its own saves."""

SIZE = 500 * 2**20
SAVES = 4
SMALLEST = 16 * 2**20
"""A smaller model would have no layers to speak of."""


def disk_needed(size: int, saves: int) -> int:
    """Bytes that are on the disk at once at most.

    The peers remove nothing before all is measured; a job keeps three checkpoints while it writes the next. On top
    comes a raw write.
    """
    return (max(saves + 1, 4) + 1) * size


@dataclass(frozen=True)
class Checkpoint:
    """How large the state is, and how often it is saved in one training."""

    size: int = SIZE
    saves: int = SAVES
    systems: Sequence[System] = SYSTEMS
    name: str = "checkpoint"
    headline: str = (
        "One worker with one thread trains and saves all of its state. Added is what the steps during a save take "
        "longer than as many undisturbed ones, waited what the loop stands still of that. Raw is a plain write and "
        "fsync, or read, of as many bytes."
    )

    def __post_init__(self) -> None:
        if self.size < SMALLEST:
            raise RequestError(
                f"--size: {size_in_words(self.size)} is too small for a model whose state has to be saved. "
                f"Give {size_in_words(SMALLEST)} or more."
            )

    def turns(self) -> list[Turn]:
        """Each system once; a start measures saves, loads and the disk."""
        order = {"size": self.size, "saves": self.saves}
        return [Turn(system, size_in_words(self.size), order, also=(RAW_DISK,)) for system in self.systems]

    def label(self, row: Row) -> str:
        """500 MB: until committed."""
        return f"{size_in_words(row.bytes or 0)}: {row.case}"

    def explained(self, rows: Sequence[Row]) -> list[Row]:
        """Each script has held its figures against the disk as it was then."""
        return list(rows)

    def remarks(self, row: Row) -> dict[str, str]:
        """Of what is added: the waiting, a step, the same during a save, and the memory. Of the others: the floor."""
        details = row.details
        if row.case != ADDED:
            return {"of raw": f"{details['of_raw']:.2f}×"} if "of_raw" in details else {}
        waited = {"waited": f"{details['waited_ms']:,.1f} ms"} if "waited_ms" in details else {}
        return {
            **waited,
            "step": f"{details['step_ms']:,.0f} ms",
            "during": f"{details['step_ratio']:.3f}×",
            "memory": f"{details['memory_of_state']:.2f}×",
        }
