"""Tensors in pieces: how a skeleton describes them, and how what a reader wants is put together from them.

Such a form has the names of the pieces, each with its offset and its size, and the shape and the type of the whole. The
name of a piece ends with its offset, so that whoever holds it gives it the same one.
"""

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quorate.checkpoint.boxes import Box, Shape, check_cover
from quorate.checkpoint.tensor_file import DTYPES
from quorate.core.errors import CheckpointError

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


def joined_forms(one: Form, other: Form) -> Form:
    """What several hold is there once."""
    if (one["shape"], one["dtype"]) != (other["shape"], other["dtype"]):
        name = next((name for name, *_ in (*one["pieces"], *other["pieces"])), "state")
        raise CheckpointError(
            f"tensor {PIECE_NAME.sub('', name)!r} has another shape or type for one worker than for another: "
            f"{one['shape']} {one['dtype']} and {other['shape']} {other['dtype']}"
        )
    by_name = {piece[0]: piece for piece in one["pieces"]}
    for piece in other["pieces"]:
        if piece != (known := by_name.setdefault(piece[0], piece)):
            raise CheckpointError(
                f"the piece {piece[0]!r} has size {known[2]} for one worker and {piece[2]} for another"
            )
    return one | {"pieces": sorted(by_name.values(), key=lambda piece: (piece[1], piece[0]))}


def assembled(form: Form, tensors: Mapping[str, torch.Tensor], wanted: Box, name: str) -> torch.Tensor:
    """What is wanted of a tensor, from those of its pieces that have some of it."""
    pieces = pieces_of(form)
    check_cover(name, tuple(form["shape"]), list(pieces.values()), wanted)
    needed = {each: box for each, box in pieces.items() if box.meet(wanted).volume}
    values = {each: stored_piece(tensors, each, form["dtype"], box) for each, box in needed.items()}
    if list(needed.values()) == [wanted]:
        return next(iter(values.values()))  # as it is in a copy of a state, and where just this was read
    made = torch.empty(wanted.size, dtype=getattr(torch, form["dtype"]))
    for each, box in needed.items():
        fill(made, wanted, values[each], box)
    return made


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
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def dtype_name(dtype: torch.dtype) -> str:
    """A type as a skeleton names it."""
    return str(dtype).removeprefix("torch.")
