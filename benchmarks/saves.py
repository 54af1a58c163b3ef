"""What saves cost a training, from the moments at which its steps ended and its saves began and ended."""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.told import reading

ADDED = "added by a save"
COMMITTED = "until committed"
LOADED = "load from the disk"
LOADED_AGAIN = "load from the page cache"
RAW = "raw-disk"


@dataclass(frozen=True)
class Save:
    """One save, in seconds: from when it was due to when nothing of it was left to do.

    `committed` is how long it took until it was durable, and `waited` how long the loop itself stood still for it, if
    that is known.
    """

    began: float
    ended: float
    committed: float
    waited: float | None = None


@dataclass(frozen=True)
class Cost:
    """What one save has cost: milliseconds that the steps during it took longer than as many undisturbed ones."""

    added_ms: float
    step_ratio: float


@dataclass(frozen=True)
class Costs:
    """Those of all saves, and the undisturbed step that they are held against."""

    step_ms: float
    saves: Sequence[Cost]

    @classmethod
    def of(cls, moments: Sequence[float], saves: Sequence[Save]) -> "Costs":
        """From the moments at which steps ended, one after the other."""
        steps = list(itertools.pairwise(moments))
        calm = [
            [later - earlier for earlier, later in stretch]
            for is_calm, stretch in itertools.groupby(steps, lambda step: not any(_meets(step, save) for save in saves))
            if is_calm
        ]
        if not calm:
            raise ValueError(
                "no step was undisturbed by a save: each was still running when the next one began. "
                "Measure a smaller state"
            )
        typical = statistics.median(step for stretch in calm for step in stretch)
        return cls(typical * 1000, [_cost(steps, save, calm) for save in saves])


@dataclass(frozen=True)
class Floor:
    """What this disk takes for the same bytes at least, in seconds: to write and fsync them, and to read them."""

    writes: Sequence[float]
    reads: Sequence[float]
    reads_again: Sequence[float]


@dataclass(frozen=True)
class Loads:
    """Seconds of each load: from the disk, and once more while all of it is in the page cache."""

    seconds: Sequence[float]
    seconds_again: Sequence[float]


def save_readings(
    size: int, costs: Costs, saves: Sequence[Save], loads: Loads, floor: Floor, memory_of_state: float
) -> list[dict[str, Any]]:
    """All that a script has measured of one system, and of the disk beside it."""
    waited = [save.waited * 1000 for save in saves if save.waited is not None]
    details = {
        "added_ms": statistics.median(cost.added_ms for cost in costs.saves),
        "step_ms": costs.step_ms,
        "step_ratio": statistics.median(cost.step_ratio for cost in costs.saves),
        "memory_of_state": memory_of_state,
        **({"waited_ms": statistics.median(waited)} if waited else {}),
    }
    # Noise may make a save look like a gift; details have the true figure.
    added = [max(0.0, cost.added_ms) for cost in costs.saves]
    timed = (
        (COMMITTED, [save.committed for save in saves], floor.writes),
        (LOADED, loads.seconds, floor.reads),
        (LOADED_AGAIN, loads.seconds_again, floor.reads_again),
    )
    return [
        reading(ADDED, 1, added, size=size, details=details),
        *(_held_against(case, size, seconds, raw) for case, seconds, raw in timed),
        *(reading(case, 1, _ms(raw), size=size, system=RAW) for case, _, raw in timed),
    ]


def _held_against(case: str, size: int, seconds: Sequence[float], raw: Sequence[float]) -> dict[str, Any]:
    details = {"of_raw": statistics.median(seconds) / statistics.median(raw)}
    return reading(case, 1, _ms(seconds), size=size, details=details)


def _ms(seconds: Sequence[float]) -> list[float]:
    return [one * 1000 for one in seconds]


def _meets(step: tuple[float, float], save: Save) -> bool:
    return step[0] < save.ended and step[1] > save.began


def _cost(steps: Sequence[tuple[float, float]], save: Save, calm: Sequence[Sequence[float]]) -> Cost:
    disturbed = [later - earlier for earlier, later in steps if _meets((earlier, later), save)]
    usual = _usual(len(disturbed), calm)
    return Cost((sum(disturbed) - usual) * 1000, sum(disturbed) / usual)


def _usual(count: int, calm: Sequence[Sequence[float]]) -> float:
    """Seconds of so many undisturbed steps: the median over all that follow each other.

    So many at a time, since what hits one step in twenty is in the sum of twenty steps, but in no median of one.
    """
    window = min(count, max(map(len, calm)))
    sums = [sum(stretch[start : start + window]) for stretch in calm for start in range(len(stretch) - window + 1)]
    return statistics.median(sums) / window * count
