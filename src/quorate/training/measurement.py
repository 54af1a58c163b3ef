"""What metrics() gives of a batch: of the validation set, or of training where a job asks for that."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from quorate.core.errors import MetricError
from quorate.core.user_code import given, likely_slip, user_code
from quorate.training.accumulated import AccumulatedMetric
from quorate.training.device import Device, is_scalar
from quorate.training.hints import hint_for
from quorate.training.replica import Replica
from quorate.training.task import Task

Sums = dict[str, tuple[float, float]]
"""Name → (sum, count)."""


class Measured(NamedTuple):
    """What metrics() gives of a batch: sums of numbers, and metrics that accumulate."""

    sums: Sums
    accumulated: dict[str, AccumulatedMetric]


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Every layer in evaluation mode, and no gradients."""
    # Each module's own mode is put back: a task may keep some layers in evaluation mode all along.
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def as_written(replica: Replica) -> AbstractContextManager[None]:
    """Nothing is compiled for metrics(): that takes a minute, was not tried before, and gives other numbers than
    `quorate evaluate`, which has no training batch to try it on."""
    return replica.device.as_written(replica.model) if replica.device.compiles else nullcontext()


def measure(task: Task, replica: Replica, content: Any, samples: int, seed: int) -> Measured:
    """The metrics of one batch, in the precision of the job; what metrics() draws comes from the seed."""
    device = replica.device
    device.seed(seed)
    batch = device.move(content)
    with device.autocast():
        return measured(task, replica.model, batch, samples, device)


def measured(task: Task, model: torch.nn.Module, batch: Any, samples: int, device: Device) -> Measured:
    """The metrics of one batch of so many samples."""
    with user_code("metrics()", hint_for):
        metrics = task.metrics(model, batch)
    if not isinstance(metrics, Mapping):
        raise MetricError(
            f"metrics() returned {given(metrics)}; it must return a dict of numbers by name.{likely_slip(metrics)}"
        )
    accumulated = {str(name): value for name, value in metrics.items() if isinstance(value, AccumulatedMetric)}
    numbers = {name: value for name, value in metrics.items() if str(name) not in accumulated}
    sums = {str(name): _sum_and_count(str(name), value, samples) for name, value in _read(numbers, device).items()}
    return Measured(sums, accumulated)


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
        raise MetricError(f"metrics() returned {given(value)} as '{name}'; a tuple must be (sum, count): two numbers.")
    return _number(name, value[0], " in (sum, count)"), _number(name, value[1], " in (sum, count)")


def _number(name: str, value: Any, where: str) -> float:
    try:
        # Not of text: float("0.5") would read it, and a slip would pass.
        if not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError, RuntimeError):
        pass
    slip = " Take its mean: .mean()." if getattr(value, "shape", None) else ""
    raise MetricError(
        f"metrics() returned {given(value)} as '{name}'{where}; a metric is one number, the mean over the samples of "
        f"the batch, or (sum, count).{slip}"
    )
