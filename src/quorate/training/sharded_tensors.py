"""Tensors that are spread over the workers of a mesh (torch's DTensors): what this worker has of them, and where that
lies in the whole.

Where a tensor lies is for torch to say: shards may be uneven, empty, or cut twice along one dimension. A tensor that is
not spread is its own local part, so that callers need not ask.
"""

import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from quorate.checkpoint.pieces import Box, Piece
from quorate.core.errors import UnsupportedModelError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_spread(value: object) -> "TypeGuard[DTensor]":
    """Whether it is spread over a mesh, though perhaps over one worker."""
    # Whoever has one has imported its class, which takes others a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this worker has of a tensor, in place."""
    return (tensor._local_tensor if is_spread(tensor) else tensor).detach()


def cut_by(tensor: torch.Tensor) -> frozenset[str]:
    """The dimensions of the mesh by which it is cut: along all others, workers hold the same of it."""
    if not is_spread(tensor):
        return frozenset()
    return _cut_by(tensor.device_mesh, tensor.placements)


@lru_cache(maxsize=4096)
def _cut_by(mesh: Any, placements: Any) -> frozenset[str]:
    names = mesh.mesh_dim_names or ()
    if any(placement.is_partial() for placement in placements) or len(names) != mesh.ndim:
        raise UnsupportedModelError(f"a tensor that is spread as {placements} over {mesh} cannot be saved")
    sized = zip(names, mesh.shape, placements, strict=True)
    return frozenset(name for name, size, placement in sized if size > 1 and not placement.is_replicate())


def box_of(tensor: torch.Tensor) -> Box | None:
    """Where in the whole it lies what this worker has of a tensor; None where that is all of it, for everybody."""
    if not is_spread(tensor) or not cut_by(tensor):
        return None
    mesh = tensor.device_mesh
    box = _box(tuple(tensor.shape), mesh, mesh.get_coordinate(), tensor.placements)
    held = tuple(tensor._local_tensor.shape)
    if box.size != held:
        raise UnsupportedModelError(
            f"a tensor of shape {list(tensor.shape)} is cut unevenly in two ways ({tensor.placements} over {mesh}), so "
            f"that it is not known which part of it this worker has: {list(held)} or {list(box.size)}. Choose another "
            "mesh, or a size that it divides."
        )
    return box


@lru_cache(maxsize=4096)
def _box(shape: tuple[int, ...], mesh: Any, _coordinate: Any, placements: Any) -> Box:
    # By coordinate too: to torch, the meshes of two workers are equal.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return Box(tuple(offset), tuple(size))


def as_piece(tensor: torch.Tensor) -> torch.Tensor | Piece:
    """What a checkpoint gets of it from this worker."""
    box = box_of(tensor)
    return local(tensor) if box is None else Piece(local(tensor), tuple(tensor.shape), box.offset)


def assign(tensor: torch.Tensor, value: torch.Tensor | Piece) -> None:
    """Write into what this worker has of a tensor: the same part of another."""
    values = value.values if isinstance(value, Piece) else local(value)
    if values.numel():  # of what is empty here a checkpoint does not know the shape
        with torch.no_grad():
            local(tensor).copy_(values)


def spread_like(tensor: torch.Tensor, value: torch.Tensor | Piece) -> torch.Tensor:
    """A new tensor that is spread as another is, with these values, of their own type."""
    values = value.values if isinstance(value, Piece) else value
    made = torch.empty_like(tensor.detach(), dtype=values.dtype)
    assign(made, values)
    return made
