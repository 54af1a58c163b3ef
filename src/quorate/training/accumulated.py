"""Metrics that are no means over samples, such as AUROC, F1 or BLEU: they accumulate, and are computed at the end.

metrics() gives one as an object that has seen its batch. What it holds then, its state, travels to the worker that has
evaluated the first batch, and is merged there in the order of batches: on any number of workers the same bits.
"""

import copy
import io
import pickle
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any, Protocol, runtime_checkable

import torch

from quorate.core.errors import MetricError
from quorate.core.user_code import given, user_code
from quorate.training.hints import hint_for


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
    of_batches = [_read(name, state) for state in states]
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
        return {f"{name}/{key}": _number(f"{name}/{key}", value) for key, value in found.items()}
    return {name: _number(name, found)}


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


def _read(name: str, state: bytes) -> Mapping[str, Any]:
    try:
        read: Mapping[str, Any] = torch.load(io.BytesIO(state), weights_only=True)
    except pickle.UnpicklingError:
        raise MetricError(
            f"metric '{name}' keeps something in its metric_state that cannot travel between workers. Keep tensors, "
            "numbers, texts, and lists and dicts of them."
        ) from None
    return read


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise MetricError(
            f"compute() of metric '{name}' gave {given(value)}; it must be one number, or a dict of numbers by name."
        ) from None
