"""A number over the steps of a run."""

import math
from dataclasses import dataclass
from typing import Any

from quorate.checkpoint.retention import is_number
from quorate.history.timeline import Timeline


@dataclass(frozen=True)
class Curve:
    """A number by step, in order; at least one, and only finite ones."""

    name: str
    points: tuple[tuple[int, float], ...]

    @property
    def values(self) -> tuple[float, ...]:
        """The numbers without their steps."""
        return tuple(value for _, value in self.points)

    @property
    def first(self) -> float:
        """The number at the first step."""
        return self.points[0][1]

    @property
    def last(self) -> float:
        """The number at the last step."""
        return self.points[-1][1]

    @property
    def least(self) -> tuple[int, float]:
        """The first step with the least number, and that number."""
        return min(self.points, key=lambda point: point[1])

    @property
    def greatest(self) -> tuple[int, float]:
        """The first step with the greatest number, and that number."""
        return max(self.points, key=lambda point: point[1])


def is_loss(name: str) -> bool:
    """Whether a field of a step is a loss: one, or one for each of several optimizers."""
    return name == "loss" or name.startswith("loss.")


def loss_curves(timeline: Timeline) -> tuple[Curve, ...]:
    """The losses of the training steps."""
    return _curves({step: _losses(fields) for step, fields in timeline.steps.items()})


def metric_curves(timeline: Timeline) -> tuple[Curve, ...]:
    """The metrics of the evaluations."""
    return _curves(timeline.evaluations)


def _losses(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if is_loss(name)}


def _curves(told: dict[int, dict[str, Any]]) -> tuple[Curve, ...]:
    points: dict[str, list[tuple[int, float]]] = {}
    for step, values in told.items():
        for name, value in values.items():
            if is_number(value) and math.isfinite(value):
                points.setdefault(name, []).append((step, value))
    return tuple(Curve(name, tuple(pairs)) for name, pairs in points.items())
