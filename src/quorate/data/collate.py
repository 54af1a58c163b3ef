"""Samples become a batch: as torch's `default_collate` does, and dataclasses too. What is done with such nests."""

import copy
import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy
import torch
from torch.utils.data import default_collate

from quorate.core.user_code import given


class UnlikeSamples(Exception):  # noqa: N818 (it is about the samples)
    """Samples that do not make a batch: the positions of two that differ (of one that cannot be stacked), and how; `at`
    says where in the samples, as Python would write it."""

    def __init__(self, positions: tuple[int, ...], how: str, at: str = "") -> None:
        self.positions = positions
        self._how, self._at = how, at
        which = f"sample{'s' if len(positions) > 1 else ''} {' and '.join(map(str, positions))}"
        super().__init__(f"{which} of a batch {self.how}")

    @property
    def how(self) -> str:
        return f"{self._how} (at {self._at})" if self._at else self._how

    def within(self, key: object) -> "UnlikeSamples":
        """The same, of what whole samples have at a key."""
        return UnlikeSamples(self.positions, self._how, f"[{key!r}]{self._at}")


def collate(samples: Sequence[Any]) -> Any:
    """A batch of the same structure as its samples, their leaves stacked."""
    try:
        return _collate(samples)
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError):
        # Looked for only now: looking at every sample of every batch would cost as much as stacking them.
        found = _difference(samples)
        if found is None:
            raise
        raise found from None


def _collate(samples: Sequence[Any]) -> Any:
    first = samples[0]
    if is_record(first):
        names = [field.name for field in dataclasses.fields(first) if field.init]
        return type(first)(**{name: _collate([getattr(sample, name) for sample in samples]) for name in names})
    if isinstance(first, Mapping):
        return {key: _collate([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(_collate(column) for column in zip(*samples, strict=True)))
    if isinstance(first, tuple | list):
        return [_collate(column) for column in zip(*samples, strict=True)]
    if all(type(sample) is numpy.uint64 for sample in samples):
        # Torch takes no such number by itself, and an array of them.
        return torch.from_numpy(numpy.array(samples))
    return default_collate(list(samples))


def _difference(samples: Sequence[Any]) -> UnlikeSamples | None:
    """The first two samples that differ in what a batch needs alike, at any depth; None if it is not that."""
    first = samples[0]
    for position, sample in enumerate(samples):
        if type(sample) is not type(first):
            return UnlikeSamples((0, position), f"differ: one is {given(first)}, the other {given(sample)}")
        if _form(sample) != _form(first):
            return UnlikeSamples((0, position), f"differ: one has {_form(first)}, the other {_form(sample)}")
    if not _is_leaf(first):
        for key in _parts(first):
            difference = _difference([_parts(sample)[key] for sample in samples])
            if difference is not None:
                return difference.within(key)
        return None
    try:
        default_collate([first])
    except TypeError:
        return UnlikeSamples((0,), f"holds {given(first)}, which cannot be stacked")
    return None


def _is_leaf(sample: Any) -> bool:
    return not is_record(sample) and not isinstance(sample, Mapping | tuple | list)


def _parts(sample: Any) -> Mapping[Any, Any]:
    if isinstance(sample, Mapping):
        return sample
    if isinstance(sample, tuple | list):
        return dict(enumerate(sample))
    return {field.name: getattr(sample, field.name) for field in dataclasses.fields(sample) if field.init}


def _form(sample: Any) -> str:
    if isinstance(sample, Mapping):
        return f"the keys {', '.join(sorted(map(str, sample)))}"
    if isinstance(sample, tuple | list):
        return f"{len(sample)} values"
    return f"shape {tuple(sample.shape)}" if hasattr(sample, "shape") else ""


_UNCHANGING = (type(None), bool, int, float, complex, str, bytes, range, Enum, type, torch.dtype, torch.device)


def fresh_copy(batch: Any) -> Any:
    """The same batch in memory of its own, as it would come from a loader process: whoever changes it changes nothing
    else. What is usual is copied here, which is several times as fast as `copy.deepcopy`."""
    if isinstance(batch, _UNCHANGING):
        return batch
    if isinstance(batch, torch.Tensor | numpy.ndarray):
        return batch.clone() if isinstance(batch, torch.Tensor) else batch.copy()
    if is_record(batch):
        names = [field.name for field in dataclasses.fields(batch) if field.init]
        return dataclasses.replace(batch, **{name: fresh_copy(getattr(batch, name)) for name in names})
    if type(batch) is dict:
        return {key: fresh_copy(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        copies = map(fresh_copy, batch)
        return type(batch)(*copies) if hasattr(batch, "_fields") else type(batch)(copies)
    return _deep_copy(batch)


def _deep_copy(value: Any) -> Any:
    """Of an object of any other class, such as one of the task."""
    try:
        return copy.deepcopy(value)
    except (TypeError, RuntimeError):
        # A lock, a generator, a tensor with a graph: nobody can copy these, and loader processes refuse them.
        return value


def mapped(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nest, with each tensor changed."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, dict):
        other = copy.copy(batch)  # a defaultdict, say, is not made of a dict alone
        for key, value in batch.items():
            other[key] = mapped(value, change)
        return other
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(value, change) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(mapped(value, change) for value in batch)
    if is_record(batch):
        other = copy.copy(batch)  # not all of its fields need be arguments, and it may be frozen
        for name in batch.__dataclass_fields__:
            object.__setattr__(other, name, mapped(getattr(batch, name), change))
        return other
    return batch


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a piece of memory, each once, in whichever order: channels last, or transposed."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def is_record(value: Any) -> bool:
    """Whether it is of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


_COMPARED = (type(None), bool, int, str, bytes, complex, torch.dtype, torch.device, Enum)


class StructureError(Exception):
    """Something in a batch has no structure by which two batches could be told to be alike; the words say what."""


def structure_of(batch: Any) -> tuple[Hashable, list[torch.Tensor]]:
    """What two batches must have in common for the same kernels to be run on them, and the tensors in order.

    Everything but the tensors' content: their shapes, types and strides, and all other values in the nest, since code
    may decide by those.
    """
    tensors: list[torch.Tensor] = []
    return _structure(batch, tensors), tensors


def _structure(batch: Any, tensors: list[torch.Tensor]) -> Hashable:
    if isinstance(batch, torch.Tensor):
        tensors.append(batch)
        return _of_tensor(batch)
    if isinstance(batch, dict):
        return type(batch), tuple((key, type(key), _structure(value, tensors)) for key, value in batch.items())
    if isinstance(batch, list | tuple):
        return type(batch), tuple(_structure(value, tensors) for value in batch)
    if is_record(batch):
        fields = batch.__dataclass_fields__
        return type(batch), tuple((name, _structure(getattr(batch, name), tensors)) for name in fields)
    if isinstance(batch, float):
        return type(batch), batch.hex()  # 0.0 equals −0.0, and NaN nothing
    if isinstance(batch, _COMPARED):
        return type(batch), batch
    raise StructureError(f"a batch holds something that is neither a tensor nor a plain value, {_kind(batch)}")


def _of_tensor(tensor: torch.Tensor) -> Hashable:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
        raise StructureError(f"a batch holds a tensor of a kind of its own, {_kind(tensor)} ({tensor.layout})")
    if tensor.requires_grad or (tensor.numel() and not is_dense(tensor)):
        raise StructureError("a batch holds a tensor that requires a gradient, or has gaps or overlaps")
    return tensor.shape, tensor.dtype, tensor.stride(), tensor.device


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
