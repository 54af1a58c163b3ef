"""What metrics() gives for a batch, as sums that can be added up over batches."""

from collections.abc import Mapping
from typing import Any

import torch

from quorate.core.errors import MetricError
from quorate.core.user_code import given, likely_slip, user_code
from quorate.training.device import Device, is_scalar
from quorate.training.lane import hint_for
from quorate.training.task import Task

Measured = dict[str, tuple[float, float]]
"""Name → (sum, count)."""


def measured(task: Task, model: torch.nn.Module, batch: Any, samples: int, device: Device) -> Measured:
    """The metrics of one batch of so many samples."""
    with user_code("metrics()", hint_for):
        metrics = task.metrics(model, batch)
    if not isinstance(metrics, Mapping):
        raise MetricError(
            f"metrics() gave {given(metrics)}; it must return a dict of numbers by name.{likely_slip(metrics)}"
        )
    return {str(name): _sum_and_count(str(name), value, samples) for name, value in _read(metrics, device).items()}


def _read(metrics: Mapping[Any, Any], device: Device) -> dict[Any, Any]:
    """The same with numbers for its tensors of one element, all of them read at once."""
    parts = [part for value in metrics.values() for part in (value if isinstance(value, tuple) else (value,))]
    numbers = iter(device.numbers([part for part in parts if is_scalar(part)])())

    def read(part: Any) -> Any:
        return next(numbers) if is_scalar(part) else part

    return {name: tuple(map(read, v)) if isinstance(v, tuple) else read(v) for name, v in metrics.items()}


def _sum_and_count(name: str, value: Any, samples: int) -> tuple[float, float]:
    if not isinstance(value, tuple):
        return _number(name, value, "") * samples, float(samples)
    if len(value) != 2:
        raise MetricError(f"metrics() gave {given(value)} as '{name}'; a tuple must be (sum, count): two numbers.")
    return _number(name, value[0], " in (sum, count)"), _number(name, value[1], " in (sum, count)")


def _number(name: str, value: Any, where: str) -> float:
    try:
        # Not of text: float("0.5") would read it, and a slip would pass.
        if not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise MetricError(
        f"metrics() gave {given(value)} as '{name}'{where}; a metric is one number, the mean over the samples of the "
        f"batch, or (sum, count).{_slip(value)}"
    )


def _slip(value: Any) -> str:
    return " Take its mean: .mean()." if getattr(value, "shape", None) else ""
