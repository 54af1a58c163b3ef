"""Batches as nests of dicts, lists, tuples and dataclasses, with tensors and plain values in them."""

from collections.abc import Callable, Hashable
from copy import copy
from enum import Enum
from typing import Any

import torch

_PLAIN = (type(None), bool, int, str, bytes, complex, torch.dtype, torch.device, Enum)


class StructureError(Exception):
    """Something in a batch has no structure by which two batches could be told to be alike; the words say what."""


def mapped(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nest, with each tensor changed."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, dict):
        other = copy(batch)  # a defaultdict, say, is not made of a dict alone
        for key, value in batch.items():
            other[key] = mapped(value, change)
        return other
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(value, change) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(mapped(value, change) for value in batch)
    if _is_dataclass(batch):
        other = copy(batch)  # not all of its fields need be arguments, and it may be frozen
        for name in batch.__dataclass_fields__:
            object.__setattr__(other, name, mapped(getattr(batch, name), change))
        return other
    return batch


def structure_of(batch: Any) -> tuple[Hashable, list[torch.Tensor]]:
    """What two batches must have in common for the same kernels to be run on them, and the tensors in order.

    Everything but the tensors' content: their shapes, types and strides, and all other values in the nest, since code
    may decide by those.
    """
    tensors: list[torch.Tensor] = []
    return _structure(batch, tensors), tensors


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a piece of memory, each once, in whichever order: channels last, or transposed."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _structure(batch: Any, tensors: list[torch.Tensor]) -> Hashable:
    if isinstance(batch, torch.Tensor):
        tensors.append(batch)
        return _of_tensor(batch)
    if isinstance(batch, dict):
        return type(batch), tuple((key, type(key), _structure(value, tensors)) for key, value in batch.items())
    if isinstance(batch, list | tuple):
        return type(batch), tuple(_structure(value, tensors) for value in batch)
    if _is_dataclass(batch):
        fields = batch.__dataclass_fields__
        return type(batch), tuple((name, _structure(getattr(batch, name), tensors)) for name in fields)
    if isinstance(batch, float):
        return type(batch), batch.hex()  # 0.0 equals −0.0, and NaN nothing
    if isinstance(batch, _PLAIN):
        return type(batch), batch
    raise StructureError(f"a batch holds something that is neither a tensor nor a plain value, {_kind(batch)}")


def _of_tensor(tensor: torch.Tensor) -> Hashable:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
        raise StructureError(f"a batch holds a tensor of a kind of its own, {_kind(tensor)} ({tensor.layout})")
    if tensor.requires_grad or (tensor.numel() and not is_dense(tensor)):
        raise StructureError("a batch holds a tensor that requires a gradient, or has gaps or overlaps")
    return tensor.shape, tensor.dtype, tensor.stride(), tensor.device


def _is_dataclass(batch: Any) -> bool:
    return hasattr(batch, "__dataclass_fields__") and not isinstance(batch, type)


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
