"""What metrics() gives of a batch: of the validation set, or of training where a job asks for that.

Numbers are summed. Metrics that are no means over samples, such as AUROC, F1 or BLEU, accumulate, and are computed at
the end: metrics() gives one as an object that has seen its batch. What it holds then, its state, travels to the worker
that has evaluated the first batch, and is merged there in the order of batches: on any number of workers the same bits.
"""

import copy
import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from operator import add
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from quorate.core.errors import MetricError
from quorate.core.user_code import given, likely_slip, user_code
from quorate.replica.device import Device
from quorate.replica.replica import Replica
from quorate.task.hints import hint_for
from quorate.task.task import Task, is_scalar

Sums = dict[str, tuple[float, float]]
"""Name → (sum, count)."""


@runtime_checkable
class AccumulatedMetric(Protocol):
    """What metrics() may give in the place of a number. Those of torchmetrics are such; one of your own has a
    `merge_state`, too, which is given the `metric_state` of each batch, in order, after a `reset`."""

    @property
    def metric_state(self) -> Mapping[str, Any]:
        """What it has seen so far: tensors, numbers, texts, and lists and dicts of them."""
        ...

    def reset(self) -> None: ...

    def compute(self) -> Any:
        """The metric: a number, or a dict of numbers by name."""
        ...


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
        return _checked(name, value, "") * samples, float(samples)
    if len(value) != 2:
        raise MetricError(f"metrics() returned {given(value)} as '{name}'; a tuple must be (sum, count): two numbers.")
    return _checked(name, value[0], " in (sum, count)"), _checked(name, value[1], " in (sum, count)")


def _checked(name: str, value: Any, where: str) -> float:
    number = _number(value)
    if number is None:
        slip = " Take its mean: .mean()." if getattr(value, "shape", None) else ""
        raise MetricError(
            f"metrics() returned {given(value)} as '{name}'{where}; a metric is one number, the mean over the samples "
            f"of the batch, or (sum, count).{slip}"
        )
    return number


def _number(value: Any) -> float | None:
    """None for what is no number. Nor is a text: float("0.5") would read it, and a slip would pass."""
    try:
        return None if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def take_states(metrics: Mapping[str, AccumulatedMetric]) -> dict[str, bytes]:
    """What each has seen, as bytes; they have seen nothing then."""
    states: dict[str, bytes] = {}
    for name, metric in metrics.items():
        with user_code(f"metric '{name}'", hint_for):
            content = io.BytesIO()
            torch.save(_on_host(_state(metric)), content)
        states[name] = content.getvalue()
    for name, metric in metrics.items():  # not before: those of a collection share what they have seen
        with user_code(f"metric '{name}'", hint_for):
            metric.reset()
    return states


def compute(name: str, metric: AccumulatedMetric, states: Sequence[bytes]) -> dict[str, float]:
    """The metric of batches with these states, by name; several if it is a dict."""
    of_batches = [_loaded(name, state) for state in states]
    if not _is_of_torchmetrics(metric) and not hasattr(metric, "merge_state"):
        raise MetricError(
            f"metric '{name}' ({type(metric).__name__}) has no merge_state(state), so what was seen in other batches "
            "cannot be added to it. Write one, or give the metrics of a collection one by one: {**collection}."
        )
    with user_code(f"metric '{name}'", hint_for):
        merged: Any = copy.deepcopy(metric)  # one that the task keeps stays on its device
        merged.reset()
        if _is_of_torchmetrics(merged):
            merged.to("cpu")
            for path, part in _parts(merged):
                _merge_in(part, [state[path] for state in of_batches])
        else:
            for state in of_batches:
                merged.merge_state(state)
        found = merged.compute()
    if isinstance(found, Mapping):
        return {f"{name}/{key}": _computed(f"{name}/{key}", value) for key, value in found.items()}
    return {name: _computed(name, found)}


def _is_of_torchmetrics(metric: Any) -> bool:
    return hasattr(metric, "_reductions")


def _parts(metric: Any) -> list[tuple[str, Any]]:
    """It and the metrics within: a wrapper and a sum of two have no state of their own, and would compute nothing."""
    return [(path, part) for path, part in metric.named_modules() if _is_of_torchmetrics(part)]


def _state(metric: AccumulatedMetric) -> Mapping[str, Any]:
    if not _is_of_torchmetrics(metric):
        return metric.metric_state
    return {path: part.metric_state for path, part in _parts(metric)}


def _merge_in(metric: Any, states: Sequence[Mapping[str, Any]]) -> None:
    """As torchmetrics merges those of several processes, of which each batch is one here. Its own `merge_state` puts
    the later before the earlier, and refuses BLEU."""
    for name, reduction in metric._reductions.items():
        of_batches = [state[name] for state in states]
        if isinstance(of_batches[0], list):
            merged: Any = [each for state in of_batches for each in state]
        elif len(of_batches) == 1:
            merged = of_batches[0]
        elif getattr(reduction, "__name__", "") == "dim_zero_sum":
            merged = reduce(add, of_batches)  # one after the other, as a single process adds them
        else:
            merged = torch.stack(of_batches) if reduction is None else reduction(torch.stack(of_batches))
        setattr(metric, name, merged)
    metric._update_count = len(states)
    metric._to_sync = False  # with the other workers of a gang: they are not here


def _on_host(value: Any) -> Any:
    """A copy without what else the memory of a tensor may hold."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True).contiguous()
    if isinstance(value, Mapping):
        return {key: _on_host(each) for key, each in value.items()}
    return type(value)(map(_on_host, value)) if type(value) in (list, tuple) else value


def _loaded(name: str, state: bytes) -> Mapping[str, Any]:
    try:
        read: Mapping[str, Any] = torch.load(io.BytesIO(state), weights_only=True)
    except pickle.UnpicklingError:
        raise MetricError(
            f"metric '{name}' keeps something in its metric_state that cannot travel between workers. Keep tensors, "
            "numbers, texts, and lists and dicts of them."
        ) from None
    return read


def _computed(name: str, value: Any) -> float:
    number = _number(value)
    if number is None:
        raise MetricError(
            f"compute() of metric '{name}' gave {given(value)}; it must be one number, or a dict of numbers by name."
        )
    return number
