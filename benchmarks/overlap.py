"""The overlap benchmark: gradients that are sent while the backward pass still runs."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.cable import PROGRAMS, RIGHTS
from benchmarks.phases import Medians, StepPhases
from benchmarks.row import Row
from benchmarks.script import LIMIT
from benchmarks.system import Needs, System, Turn
from benchmarks.told import reading

SCRIPT = "benchmarks.own.overlap"
NEEDS = Needs(programs=PROGRAMS, rights=RIGHTS)
OVERLAP = System("quorate", SCRIPT, is_ours=True, needs=NEEDS)
NO_OVERLAP = System("quorate-no-overlap", SCRIPT, is_ours=True, needs=NEEDS)
SYSTEMS = (OVERLAP, NO_OVERLAP)

MBIT = 200.0
WORKERS = 2
PHASES = ("forward", "backward", "exchange", "apply", "ideal")


@dataclass(frozen=True)
class Overlap:
    """How fast the cable is, and how long is trained on it: so many stretches with and without, by turns."""

    mbit: float = MBIT
    stretches: int = 3
    warm_up: int = 2
    steps: int = 8
    name: str = "overlap"
    headline: str = (
        "A step of 2 workers in network namespaces, joined by a slow cable. Ideal is forward + the longer of backward "
        "and exchange + apply, as they are without overlap."
    )

    @property
    def case(self) -> str:
        """The speed of the cable."""
        return f"{self.mbit:g} Mbit/s"

    def turns(self) -> list[Turn]:
        """One: both are measured by the same processes on the same cable."""
        order = {
            "case": self.case,
            "mbit": self.mbit,
            "stretches": [system is OVERLAP for _ in range(self.stretches) for system in (NO_OVERLAP, OVERLAP)],
            "warm_up": self.warm_up,
            "steps": self.steps,
            "limit": LIMIT,
        }
        return [Turn(OVERLAP, self.case, order, also=(NO_OVERLAP,))]

    def label(self, row: Row) -> str:
        """The speed of the cable."""
        return row.case

    def explained(self, rows: Sequence[Row]) -> list[Row]:
        """Each round has its own ideal, since each chooses its own batch: the script has held them against it."""
        return list(rows)

    def remarks(self, row: Row) -> dict[str, str]:
        """The phases in milliseconds, the ideal step, and how near to it this one is."""
        phases = {phase: f"{row.details[f'{phase}_ms']:.1f}" for phase in PHASES}
        return phases | {"of ideal": f"{row.details['of_ideal']:.2f}×"}


def overlap_readings(
    case: str, stretches: Sequence[tuple[bool, Sequence[StepPhases]]], more: Mapping[str, float]
) -> list[dict[str, Any]]:
    """What all stretches of a round come to, with overlap and without; `more` is what else there is to tell."""
    steps = {
        system: [step for overlaps, stretch in stretches for step in stretch if overlaps is (system is OVERLAP)]
        for system in SYSTEMS
    }
    ideal = Medians.of(steps[NO_OVERLAP]).ideal_ms
    return [_reading(system, case, steps[system], ideal, more) for system in SYSTEMS]


def _reading(
    system: System, case: str, steps: Sequence[StepPhases], ideal: float, more: Mapping[str, float]
) -> dict[str, Any]:
    walls = [step.wall for step in steps]
    medians = asdict(Medians.of(steps))
    details = {**medians, "ideal_ms": ideal, "of_ideal": statistics.median(walls) / ideal, **more}
    return reading(case, WORKERS, walls, details=details, system=system.name)
