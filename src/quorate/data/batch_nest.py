"""Whether two batches, nests of dicts, lists, tuples and dataclasses, have the same kernels run on them."""

from collections.abc import Hashable
from enum import Enum
from typing import Any

import torch

from quorate.data.collate import is_dense, is_record

_PLAIN = (type(None), bool, int, str, bytes, complex, torch.dtype, torch.device, Enum)


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
    if isinstance(batch, _PLAIN):
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
