"""Reads of a checkpoint what one reader wants of it, a tensor at a time: a worker of another mesh its own part, and
whoever needs the whole state all of it.

Nobody needs the memory of more than that and the largest tensor of a file. (An encrypted file is opened as a whole.)
"""

import json
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from quorate.checkpoint.manifest import Boxes, Part, Seal
from quorate.checkpoint.part_file import read_part, reading, verify_part
from quorate.checkpoint.pieces import (
    PIECE_NAME,
    Box,
    Form,
    Piece,
    check_cover,
    fill,
    form_of,
    pieces_of,
    stored_piece,
)
from quorate.checkpoint.tensor_file import tensors_from, tensors_in
from quorate.checkpoint.tree import Encoded, Place, changed, dotted, tensor_forms
from quorate.core.errors import CheckpointError


def collected(skeleton: Any, tensors: Iterable[tuple[str, torch.Tensor]], boxes: Boxes | None) -> Encoded:
    """A state as a reader wants it: of tensors that `boxes` cuts this one piece, and all others whole.

    Raises `CheckpointError` where the pieces of a tensor do not cover what is wanted of it exactly once.
    """
    collection = _Collection(skeleton, boxes)
    for name, tensor in tensors:
        collection.take(name, tensor)
    collection.check()
    return Encoded(collection.skeleton, collection.tensors)


def read_tensors(folder: Path, part: Part, cipher: Seal | None) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a part, one after another, each in memory of its own. Only after the last is the part verified:
    raises `CheckpointError` then where it is not what the manifest says."""
    if cipher is not None:
        yield from ((name, tensor.clone()) for name, tensor in tensors_in(read_part(folder, part, cipher)).items())
        return
    try:
        with reading(folder, part) as fill_buffer:
            yield from tensors_from(fill_buffer, part.bytes)
    except CheckpointError:
        verify_part(folder, part)  # that it is damaged is what helps, and not what cannot be read for that reason
        raise


def join_skeletons(skeletons: Iterable[Any]) -> Any:
    """Of several trees, each a part of one, the skeleton of the whole; what two of them have is alike."""
    return reduce(_join, skeletons)


def _join(one: Any, other: Any) -> Any:
    joined = one
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        joined = list(map(_join, one, other))
    elif not isinstance(one, dict) or not isinstance(other, dict):
        pass  # a plain value, which is alike
    elif "dict" in one and "dict" in other:
        ours, theirs = one["dict"], other["dict"]
        joined = {"dict": ours | {key: _join(ours[key], form) if key in ours else form for key, form in theirs.items()}}
    elif "tuple" in one and "tuple" in other:
        joined = {"tuple": _join(one["tuple"], other["tuple"])}
    elif "pieces" in one and "pieces" in other:
        joined = _joined_forms(one, other)
    elif "pairs" in one or "pairs" in other:  # a dictionary without keys is one of strings, as far as anybody knows
        pairs = [*one.get("pairs", ()), *other.get("pairs", ())]
        by_key: dict[str, Any] = {}
        for key, form in pairs:
            known = by_key.setdefault(json.dumps(key), (key, form))
            by_key[json.dumps(key)] = (key, _join(known[1], form))
        in_order = sorted(by_key.items(), key=lambda item: (int(item[0]) if item[0].isdecimal() else -1, item[0]))
        joined = {"pairs": [list(pair) for _, pair in in_order]}
    return joined


def _joined_forms(one: Form, other: Form) -> Form:
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


def is_cut_alike(one: Any, other: Any) -> bool:
    """Whether two skeletons have the same tensors whole, and the others in the same pieces."""
    cuts = [
        {dotted(place): sorted(pieces_of(form)) for place, form in tensor_forms(skeleton) if "pieces" in form}
        for skeleton in (one, other)
    ]
    return cuts[0] == cuts[1]


class _Collection:
    """What was wanted of a state and has come so far; the forms of whole tensors are known when these come."""

    def __init__(self, skeleton: Any, boxes: Boxes | None) -> None:
        self._boxes: Boxes = boxes or (lambda _place, _shape: None)
        self._whole: dict[str, list[tuple[Place, Form]]] = {}
        self._pieces: dict[str, list[Callable[[torch.Tensor], None]]] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.skeleton = changed(skeleton, self._expect)

    def take(self, name: str, tensor: torch.Tensor) -> None:
        for take in self._pieces.pop(name, ()):
            take(tensor)
        for place, form in self._whole.pop(name, ()):
            typed = tensor.view(getattr(torch, form["dtype"])).reshape(form["shape"]) if "dtype" in form else tensor
            shape = tuple(typed.shape)
            if (box := self._boxes(place, shape)) is None:
                self.tensors[name] = tensor
                continue
            piece = Piece(typed[box.within(Box.whole(shape))].clone(), shape, box.offset)
            form.clear()
            form.update(form_of(name, piece))
            self.tensors |= dict.fromkeys(pieces_of(form), piece.values)

    def check(self) -> None:
        for what, expected in (("piece", self._pieces), ("tensor", self._whole)):
            if lacking := next(iter(expected), None):
                raise CheckpointError(f"the checkpoint lacks the {what} {lacking!r}")

    def _expect(self, form: Form, place: Place) -> Form:
        if "tensor" in form:
            coming = dict(form)
            self._whole.setdefault(form["tensor"], []).append((place, coming))
            return coming
        shape, pieces = tuple(form["shape"]), pieces_of(form)
        box = self._boxes(place, shape)
        wanted = Box.whole(shape) if box is None else box
        check_cover(dotted(place), shape, list(pieces.values()), wanted)
        if not wanted.volume:
            return form | {"pieces": []}
        values = torch.empty(wanted.size, dtype=getattr(torch, form["dtype"]))
        base = PIECE_NAME.sub("", next(iter(pieces)))
        new = {"tensor": base} if box is None else form_of(base, Piece(values, shape, box.offset))
        name = base if box is None else new["pieces"][0][0]
        if name in self.tensors:
            return new  # tied to one that is expected already
        self.tensors[name] = values

        def taking(each: str, of: Box) -> Callable[[torch.Tensor], None]:
            return lambda tensor: fill(values, wanted, stored_piece({each: tensor}, each, form["dtype"], of), of)

        for each, of in pieces.items():
            if of.meet(wanted).volume:
                self._pieces.setdefault(each, []).append(taking(each, of))
        return new
