"""Tensors in pieces: where a piece lies in the whole, whether pieces are the whole without gap or overlap, and how a
skeleton describes them.

Such a form has the names of the pieces, each with its offset and its size, and the shape and the type of the whole. The
name of a piece ends with its offset, so that whoever holds it gives it the same one.
"""

import contextlib
import heapq
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quorate.checkpoint.tensor_file import DTYPES
from quorate.core.errors import CheckpointError

Shape = tuple[int, ...]


@dataclass(frozen=True, order=True)
class Box:
    """A part of a tensor: where it begins and how large it is, in each dimension. It may be empty."""

    offset: Shape
    size: Shape

    @classmethod
    def whole(cls, shape: Iterable[int]) -> "Box":
        """All of a tensor of this shape."""
        size = tuple(shape)
        return cls((0,) * len(size), size)

    @property
    def volume(self) -> int:
        return math.prod(self.size)

    @property
    def stop(self) -> Shape:
        return tuple(begin + size for begin, size in zip(self.offset, self.size, strict=True))

    def meet(self, other: "Box") -> "Box":
        """What both have."""
        begins = tuple(map(max, self.offset, other.offset))
        ends = map(min, self.stop, other.stop)
        return Box(begins, tuple(max(0, end - begin) for begin, end in zip(begins, ends, strict=True)))

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Where it lies in the values of a box that contains it."""
        starts = (begin - first for begin, first in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(start, start + size) for start, size in zip(starts, self.size, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{begin}:{end}" for begin, end in zip(self.offset, self.stop, strict=True)) + "]"


def check_cover(name: str, shape: Shape, boxes: Sequence[Box], wanted: Box | None = None) -> None:
    """Raise `CheckpointError` unless these boxes of a tensor are disjoint and cover what is wanted: all, by default."""
    whole = Box.whole(shape)
    for box in boxes:
        if not len(box.offset) == len(box.size) == len(shape) or min((0, *box.offset, *box.size)) < 0:
            raise CheckpointError(
                f"tensor {name!r} has a piece at {list(box.offset)} of shape {list(box.size)}, which does not fit "
                f"its own, {list(shape)}"
            )
        if box.volume and whole.meet(box) != box:
            raise CheckpointError(f"tensor {name!r} has a piece {box} beyond its shape {list(shape)}")
    filled = [box for box in boxes if box.volume]
    _check_disjoint(name, filled)
    asked = whole if wanted is None else wanted
    found = sum(asked.meet(box).volume for box in filled)
    if found != asked.volume:
        raise CheckpointError(
            f"tensor {name!r} of shape {list(shape)} is not whole: of the {asked.volume:,} elements of {asked} its "
            f"pieces have {found:,}"
        )


def _check_disjoint(name: str, boxes: Sequence[Box]) -> None:
    """In the order in which they begin: each is compared with those only that have not ended by then."""
    begun: list[tuple[int, int, Box]] = []
    for index, box in enumerate(sorted(boxes)):
        begin, end = (box.offset[0], box.stop[0]) if box.size else (0, 1)
        while begun and begun[0][0] <= begin:
            heapq.heappop(begun)
        for _, _, other in begun:
            if box.meet(other).volume:
                raise CheckpointError(f"tensor {name!r} has pieces that overlap: {other} and {box}")
        heapq.heappush(begun, (end, index, box))


PIECE_NAME = re.compile(r"@[0-9,]*$")
"""How the name of a piece ends; no other tensor has such a name."""
Form = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a tensor: its values, the shape of the whole, and where it begins in that. It may be empty."""

    values: torch.Tensor
    shape: Shape
    offset: Shape

    @property
    def box(self) -> Box:
        return Box(self.offset, tuple(self.values.shape))


def form_of(name: str, piece: Piece) -> Form:
    """What the skeleton of whoever holds one piece of a tensor says of it; nothing of one that is empty."""
    full = f"{name}@{','.join(map(str, piece.offset))}"
    own = [[full, list(piece.offset), list(piece.values.shape)]] if piece.values.numel() else []
    return {"pieces": own, "shape": list(piece.shape), "dtype": dtype_name(piece.values.dtype)}


def pieces_of(form: Form) -> dict[str, Box]:
    """Where the pieces of a tensor lie in it, by their names."""
    return {name: Box(tuple(offset), tuple(size)) for name, offset, size in form["pieces"]}


def fill(target: torch.Tensor, wanted: Box, source: torch.Tensor, box: Box) -> None:
    """Copy into the values of one box what another box of the same tensor has of it."""
    common = wanted.meet(box)
    if common.volume:
        target[common.within(wanted)].copy_(source[common.within(box)])


def stored_piece(tensors: Mapping[str, torch.Tensor], name: str, dtype: str, box: Box) -> torch.Tensor:
    """A piece as its form describes it."""
    if name not in tensors:
        raise CheckpointError(f"the checkpoint lacks the piece {name!r}")
    tensor, kind = tensors[name], getattr(torch, dtype)
    with contextlib.suppress(RuntimeError):
        tensor = tensor if kind in DTYPES else tensor.view(kind).reshape(box.size)
    if tensor.dtype != kind or tuple(tensor.shape) != box.size:
        found = f"{list(tensor.shape)} {dtype_name(tensor.dtype)}"
        raise CheckpointError(f"the piece {name!r} should be {list(box.size)} {dtype}, and is {found}")
    return tensor


def storable(tensor: torch.Tensor) -> torch.Tensor:
    """As a safetensors file has it: of types that it does not know, the bytes."""
    if tensor.dtype in DTYPES:
        return tensor
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)  # a single element may have any stride


def dtype_name(dtype: torch.dtype) -> str:
    """A type as a skeleton names it."""
    return str(dtype).removeprefix("torch.")
