"""Tensors as bytes, for digests."""

from collections.abc import Iterable

import torch

from quorate.core.digests import NamedBytes, tensor_digest


def content(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, without a copy where it is contiguous."""
    return _raw(tensor).numpy().data


def named_bytes(name: str, tensor: torch.Tensor) -> NamedBytes:
    """A tensor as any process can describe it."""
    return NamedBytes(name, str(tensor.dtype), tuple(tensor.shape), content(tensor))


def digests(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """A digest by name, for comparing replicas."""
    return {name: tensor_digest(named_bytes(name, tensor)) for name, tensor in tensors}


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are equal to the last bit: −0.0 is not 0.0, and a NaN equals itself."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(_raw(left), _raw(right))


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
