"""Numbers over the steps of a run: curves of losses and metrics, and how fast it went."""

import math
from dataclasses import dataclass
from typing import Any

from quorate.checkpoint.best import is_number
from quorate.history.timeline import Timeline
from quorate.observe.events import StepCompleted

PHASES = ("data", "compute", "exchange", "apply")
NEEDED = ("losses", "samples", "samples_per_second", *(f"{phase}_s" for phase in PHASES))
"""The fields of a step that are needed here."""


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


@dataclass(frozen=True)
class RunPace:
    """Means over all steps: seconds for a step, samples a second, and the share of each phase in a step's time."""

    step_seconds: float
    samples_per_second: float
    shares: dict[str, float]

    @classmethod
    def of(cls, timeline: Timeline) -> "RunPace | None":
        """From the steps of a run; none where no step tells its speed."""
        told = [step for step in timeline.steps.values() if _tells_speed(step)]
        seconds = sum(step.samples / step.samples_per_second for step in told)
        if not seconds:
            return None
        spent = {phase: sum(getattr(step, f"{phase}_s") or 0.0 for step in told) for phase in PHASES}
        shares = {phase: spent[phase] / seconds for phase in PHASES if spent[phase]}
        return cls(seconds / len(told), sum(step.samples for step in told) / seconds, shares)


def loss_curves(timeline: Timeline) -> tuple[Curve, ...]:
    """The losses of the training steps."""
    return _curves({number: step.by_optimizer("loss") for number, step in timeline.steps.items()})


def metric_curves(timeline: Timeline) -> tuple[Curve, ...]:
    """The metrics of the evaluations."""
    return _curves(timeline.evaluations)


def _curves(told: dict[int, dict[str, Any]]) -> tuple[Curve, ...]:
    points: dict[str, list[tuple[int, float]]] = {}
    for step, values in told.items():
        for name, value in values.items():
            if is_number(value) and math.isfinite(value):
                points.setdefault(name, []).append((step, value))
    return tuple(Curve(name, tuple(pairs)) for name, pairs in points.items())


def _tells_speed(step: StepCompleted) -> bool:
    return bool(step.samples) and 0 < (step.samples_per_second or 0) < math.inf
