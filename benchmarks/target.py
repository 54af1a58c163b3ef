"""What the product wants to reach, and how that is held against what was measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.row import Row

Value = Callable[[Sequence[Row]], float | None]
"""The figure that a target is about; none where the rows do not have it."""

Verdict = Literal["met", "missed", "not measured"]


@dataclass(frozen=True)
class Target:
    """A figure that is to be reached: at least `limit`, or at most. `cores` are those of the machines it is about."""

    bench: str
    text: str
    value: Value
    limit: float
    is_lowest: bool = True
    cores: range | None = None


@dataclass(frozen=True)
class Judgement:
    """How a target was met."""

    target: Target
    value: float | None
    verdict: Verdict

    def to_dict(self) -> dict[str, Any]:
        """For a JSON document."""
        wanted = "at_least" if self.target.is_lowest else "at_most"
        return {"target": self.target.text, wanted: self.target.limit, "value": self.value, "verdict": self.verdict}


def judge(targets: Sequence[Target], bench: str, rows: Sequence[Row], cores: int) -> list[Judgement]:
    """All targets of a benchmark that are about a machine like this. What was not measured is never met."""
    return [
        _judged(target, target.value(rows))
        for target in targets
        if target.bench == bench and (target.cores is None or cores in target.cores)
    ]


def _judged(target: Target, value: float | None) -> Judgement:
    if value is None:
        return Judgement(target, None, "not measured")
    met = value >= target.limit if target.is_lowest else value <= target.limit
    return Judgement(target, value, "met" if met else "missed")
