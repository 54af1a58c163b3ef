"""The tune benchmark: what a search costs beyond the training of its trials, and what stopping early saves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.row import Row, details_in_words
from benchmarks.system import System, Turn

TUNE = System("quorate-tune", "benchmarks.own.tune", is_ours=True)

LONG = "trials of 30 s, 2 at a time"
ASHA = "digits, asha against all steps"
FASHION = "fashion-mnist, asha against all steps"
PBT = "digits, pbt against random"


@dataclass(frozen=True)
class Tune:
    """Which rows are measured. A Ray cluster is up when a search begins, and ends with its row."""

    rows: Sequence[str]
    trials: int = 200
    concurrent: int = 10
    name: str = "tune"
    headline: str = "Hyperparameter searches on a Ray cluster that is up: from the command to its end."

    def turns(self) -> list[Turn]:
        """Every row that was asked for."""
        return [ROWS[row](self) for row in self.rows]

    def label(self, row: Row) -> str:
        """The case."""
        return row.case

    def explained(self, rows: Sequence[Row]) -> list[Row]:
        """As they are."""
        return list(rows)

    def remarks(self, row: Row) -> dict[str, str]:
        """What the targets are about."""
        return details_in_words(row, REMARKS)

    # --- the rows

    def long(self) -> Turn:
        """Trials beside which all else should not count."""
        return _turn("long", LONG, trials=10, concurrent=2, seconds=30.0)

    def many(self) -> Turn:
        """Trials that hardly train."""
        return _turn("many", many_case(self.trials, self.concurrent), trials=self.trials, concurrent=self.concurrent)

    def asha(self) -> Turn:
        """The same trials with and without a scheduler."""
        return _turn("asha", ASHA, trials=16, concurrent=2)

    def fashion(self) -> Turn:
        """The same with an epoch of Fashion-MNIST."""
        return _turn("fashion", FASHION, trials=16, concurrent=2)

    def pbt(self) -> Turn:
        """The same first trials, with and without a population, by five seeds."""
        return _turn("pbt", PBT, trials=8, concurrent=2, seeds=5)


ROWS: dict[str, Callable[[Tune], Turn]] = {
    "long": Tune.long,
    "many": Tune.many,
    "asha": Tune.asha,
    "fashion": Tune.fashion,
    "pbt": Tune.pbt,
}

REMARKS = {
    "of_training": ("of training", 3, "×"),
    "beyond_ms": ("beyond training, each", 0, " ms"),
    "in_place_ms": ("of its place", 0, " ms"),
    "driver_mb": ("driver", 0, " MB"),
    "growth_mb": ("growth after a quarter", 0, " MB"),
    "steps_percent": ("steps", 0, " %"),
    "points_lost": ("points lost", 2, ""),
    "not_worse": ("seeds not worse", 0, ""),
    "points_won": ("points won, mean", 2, ""),
}
"""The details that people see: the name of the column, digits, unit."""


def many_case(trials: int, concurrent: int) -> str:
    """200 tiny trials, 10 at a time."""
    return f"{trials} tiny trials, {concurrent} at a time"


def _turn(row: str, case: str, **order: Any) -> Turn:
    return Turn(TUNE, case, {"row": row, "case": case, **order})
