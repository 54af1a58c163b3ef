"""The changes benchmark: what workers that come and go on request cost those that stay."""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.row import Row
from benchmarks.system import System, Turn

QUORATE = System("quorate", "benchmarks.own.changes", is_ours=True)

STEP_MS = 100
SIZES = (2, 4, 1, 3)
LANES = 4
SIGTERM = "SIGTERM to a worker"
USUAL = 6
"""Steps whose median is the usual one, before a change and after it."""


@dataclass(frozen=True)
class Pause:
    """The longest time between two steps around a change, and the usual one before and after it, in milliseconds."""

    longest: float
    before: float
    after: float

    @classmethod
    def around(cls, moments: Sequence[float], began: float, ended: float) -> "Pause":
        """From the moments in seconds at which steps were complete; `ended` is when everybody trains steadily again."""
        gaps = [(later, (later - earlier) * 1000) for earlier, later in itertools.pairwise(sorted(moments))]
        before = [gap for later, gap in gaps if later < began]
        around = [gap for later, gap in gaps if began <= later < ended]
        if not before or not around:
            raise ValueError("no step was complete before the change, or none after it")
        return cls(max(around), statistics.median(before[-USUAL:]), statistics.median(around[-USUAL:]))

    @property
    def beyond(self) -> float:
        """What the change has cost: a worker that hosts more lanes has longer steps, and that is not the change."""
        return max(0.0, self.longest - max(self.before, self.after))


def resize_case(before: int, after: int) -> str:
    """Resize 2→4."""
    return f"resize {before}→{after}"


@dataclass(frozen=True)
class Changes:
    """The numbers of workers that one job goes through; then each of its workers is asked to leave."""

    sizes: Sequence[int] = SIZES
    step_ms: float = STEP_MS
    name: str = "changes"
    headline: str = (
        "A running job is resized, and each of its workers gets a SIGTERM; a lane takes 100 ms. The longest pause "
        "between two steps around the change, beyond the longer of the usual steps before and after it."
    )

    def turns(self) -> list[Turn]:
        """One: all changes happen to the same run."""
        order = {"sizes": list(self.sizes), "lanes": LANES, "step_ms": self.step_ms}
        return [Turn(QUORATE, "→".join(map(str, self.sizes)), order)]

    def label(self, row: Row) -> str:
        """The change."""
        return row.case

    def explained(self, rows: Sequence[Row]) -> list[Row]:
        """The script has told all."""
        return list(rows)

    def remarks(self, row: Row) -> dict[str, str]:
        """The pause itself, the usual steps, and how many workers were taken for lost."""
        pauses = {name: f"{row.details[f'{name}_ms']:,.0f} ms" for name in ("before", "after", "longest")}
        return {**pauses, "worst": f"{row.details['worst_ms']:,.1f} ms", "lost": f"{row.details['lost_workers']:.0f}"}
