"""Reads of a checkpoint what one reader wants of it, a tensor at a time: a worker of another mesh its own part, and
whoever needs the whole state all of it.

Nobody needs the memory of more than that and the largest tensor of a file. (An encrypted file is opened as a whole.)
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from quorate.checkpoint.boxes import Box, Boxes, check_cover
from quorate.checkpoint.manifest import Part
from quorate.checkpoint.part_file import read_part, reading, verify_part
from quorate.checkpoint.pieces import PIECE_NAME, Form, Piece, fill, form_of, pieces_of, stored_piece
from quorate.checkpoint.seal import Seal
from quorate.checkpoint.tensor_file import tensors_from, tensors_in
from quorate.checkpoint.tree import Encoded, Place, decode, dotted
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


def is_in_pieces(skeleton: Any) -> bool:
    """Whether somebody has written it who held only a part of a tensor."""
    return any("pieces" in form for _, form in tensor_forms(skeleton))


def is_cut_alike(one: Any, other: Any) -> bool:
    """Whether two skeletons have the same tensors whole, and the others in the same pieces."""
    cuts = [
        {dotted(place): sorted(pieces_of(form)) for place, form in tensor_forms(skeleton) if "pieces" in form}
        for skeleton in (one, other)
    ]
    return cuts[0] == cuts[1]


def _changed(form: Any, change: Callable[[Form, Place], Any], place: Place = ()) -> Any:
    """A skeleton with other forms in the place of its tensors, whole or in pieces; the rest is the same."""
    if isinstance(form, list):
        return [_changed(item, change, (*place, index)) for index, item in enumerate(form)]
    new = form
    match next(iter(form), "nothing") if isinstance(form, dict) else "plain":
        case "dict":
            new = {"dict": {key: _changed(item, change, (*place, key)) for key, item in form["dict"].items()}}
        case "pairs":
            keyed = [(key, decode(key, {}), item) for key, item in form["pairs"]]
            new = {"pairs": [[key, _changed(item, change, (*place, known))] for key, known, item in keyed]}
        case "tuple":
            new = {"tuple": _changed(form["tuple"], change, place)}
        case "tensor" | "pieces":
            new = change(form, place)
    return new


def tensor_forms(skeleton: Any) -> Iterator[tuple[Place, Form]]:
    """The tensors of a skeleton, whole or in pieces, by their places."""
    found: list[tuple[Place, Form]] = []
    _changed(skeleton, lambda form, place: found.append((place, form)))
    return iter(found)


def check_written(skeleton: Any, written: Iterable[Iterable[str]]) -> None:
    """Raise `CheckpointError` unless each tensor of a skeleton was written, whole, by one of those who say what they
    have: a checkpoint that lacks one would be found out by whoever needs it."""
    check_pieces(skeleton)
    counts = Counter(chain.from_iterable(written))
    for place, form in tensor_forms(skeleton):
        for name in [form["tensor"]] if "tensor" in form else pieces_of(form):
            if counts[name] != 1:
                raise CheckpointError(
                    f"'{dotted(place)}' was written by {counts[name]} workers as {name!r}, not by one"
                )


def check_pieces(skeleton: Any) -> None:
    """Raise `CheckpointError` where the pieces of a tensor are not the whole, each element once."""
    for place, form in tensor_forms(skeleton):
        if "pieces" in form:
            check_cover(dotted(place), tuple(form["shape"]), list(pieces_of(form).values()))


class _Collection:
    """What was wanted of a state and has come so far; the forms of whole tensors are known when these come."""

    def __init__(self, skeleton: Any, boxes: Boxes | None) -> None:
        self._boxes: Boxes = boxes or (lambda _place, _shape: None)
        self._whole: dict[str, list[tuple[Place, Form]]] = {}
        self._pieces: dict[str, list[Callable[[torch.Tensor], None]]] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.skeleton = _changed(skeleton, self._expect)

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
