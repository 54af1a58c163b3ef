"""Samples become a batch: as torch's `default_collate` does, and dataclasses too."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
from torch.utils.data import default_collate


def collate(samples: Sequence[Any]) -> Any:
    """A batch of the same structure as its samples, their leaves stacked."""
    first = samples[0]
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first) if field.init]
        return type(first)(**{name: collate([getattr(sample, name) for sample in samples]) for name in names})
    if isinstance(first, Mapping):
        return {key: collate([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(collate(column) for column in zip(*samples, strict=True)))
    if isinstance(first, tuple | list):
        return [collate(column) for column in zip(*samples, strict=True)]
    return default_collate(list(samples))


def fresh_copy(batch: Any) -> Any:
    """The same structure with every tensor and array in memory of its own."""
    if isinstance(batch, torch.Tensor | numpy.ndarray):
        return batch.clone() if isinstance(batch, torch.Tensor) else batch.copy()
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch) if field.init]
        return dataclasses.replace(batch, **{name: fresh_copy(getattr(batch, name)) for name in names})
    if isinstance(batch, dict):
        return {key: fresh_copy(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(fresh_copy, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(fresh_copy, batch))
    return batch
