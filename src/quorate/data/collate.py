"""Samples become a batch: as torch's `default_collate` does, and dataclasses too."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

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
