"""The best evaluation of a run."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard


@dataclass(frozen=True)
class Watched:
    """The metric that says which model is the best, and whether the lowest or the highest value is (min or max)."""

    metric: str
    mode: str

    @classmethod
    def by(cls, job: Mapping[str, Any]) -> "Watched":
        """As the keys of a job say it, by default the lowest loss."""
        evaluate = job.get("evaluate")
        keys = evaluate if isinstance(evaluate, dict) else {}
        return cls(str(keys.get("metric") or "loss"), "max" if keys.get("mode") == "max" else "min")


@dataclass(frozen=True)
class BestEvaluation:
    """The best value of the watched metric, and the step of its evaluation."""

    watched: Watched
    value: float
    step: int

    @property
    def rank(self) -> float:
        """The lower, the better."""
        return self.value if self.watched.mode == "min" else -self.value


def best_of(evaluations: Mapping[int, Mapping[str, Any]], watched: Watched) -> BestEvaluation | None:
    """The best of these, the earlier of two equals; one that is not a number is never the best."""
    found = [
        BestEvaluation(watched, float(value), step)
        for step, metrics in evaluations.items()
        if is_number(value := metrics.get(watched.metric)) and not math.isnan(value)
    ]
    return better_of(found)


def better_of(found: Iterable[BestEvaluation | None]) -> BestEvaluation | None:
    """The best of those that there are, the earlier of two equals."""
    return min(filter(None, found), key=lambda best: (best.rank, best.step), default=None)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value that was read from a file is a number, and not true or false."""
    return type(value) in (int, float)
