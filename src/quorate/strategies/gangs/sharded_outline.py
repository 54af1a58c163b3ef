"""What the tensors of a sharded state are called, and where they lie: worked out once, and used again by every save for
as long as nothing of it changes.

To name and cut the tensors of a large model takes tens of milliseconds for which training would stand still.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from quorate.checkpoint.pieces import storable
from quorate.checkpoint.reshard import tensor_forms
from quorate.checkpoint.tree import Encoded, Place, encode
from quorate.training.sharded_tensors import as_piece, cut_by, is_spread, local

Named = dict[str, torch.Tensor]
Mark = tuple[Any, ...]


class _Leaf(NamedTuple):
    """A value of a state, and of a tensor what this worker has of it."""

    place: Place
    value: Any
    held: torch.Tensor | None


@dataclass(frozen=True)
class _Known:
    """Of a state with these marks: its skeleton, and for each leaf the name under which it is written and the one by
    which it is compared, None where it is not. Tensors are not kept: an optimizer may let go of them."""

    marks: list[Mark]
    skeleton: Any
    written: list[str | None]
    compared: list[str | None]


class StateOutline:
    """Encodes what the workers of one part of the mesh hold of a state: weights, and what optimizers keep of each."""

    def __init__(self, part: int) -> None:
        self._part = part
        self._known: _Known | None = None

    def encode(self, tree: dict[str, Any]) -> tuple[Encoded, Named]:
        """`tree` has `tensors` by name, and the `state` of each of the `optimizers` by number and name; also gives what
        is compared with those who hold the same, by names for people."""
        leaves = list(_leaves(tree))
        marks = list(map(_mark, leaves))
        known = self._known
        if known is None or known.marks != marks:
            skeleton = encode({"replica": in_pieces(tree)}).skeleton
            names = {place[1:]: _name_of(form) for place, form in tensor_forms(skeleton)}
            compared = [None if leaf.held is None else self._compared(leaf) for leaf in leaves]
            known = self._known = _Known(marks, skeleton, [names.get(leaf.place) for leaf in leaves], compared)
        tensors = {name: storable(held) for name, held in _named(known.written, leaves)}
        return Encoded(known.skeleton, tensors), dict(_named(known.compared, leaves))

    def _compared(self, leaf: _Leaf) -> str:
        kind, *keys = leaf.place
        name = keys[0] if kind == "tensors" else " ".join(map(str, ("optimizer", keys[0], *keys[2:])))
        return named(name, leaf.value, self._part)


def named(name: str, tensor: torch.Tensor, part: int) -> str:
    """Equal for those only who hold the same of it."""
    return f"{name} (part {part})" if cut_by(tensor) else name


def in_pieces(tree: Any) -> Any:
    """The same with the part of this worker in the place of each tensor that is spread."""
    if isinstance(tree, dict):
        return {key: in_pieces(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map(in_pieces, tree))
    return as_piece(tree) if is_spread(tree) else tree


def _leaves(tree: dict[str, Any]) -> Iterator[_Leaf]:
    for name, tensor in tree["tensors"].items():
        yield _Leaf(("tensors", name), tensor, local(tensor))
    for optimizer, kept in tree["optimizers"].items():
        for number, values in kept["state"].items():
            yield from _values(("optimizers", optimizer, "state", number), values)


def _values(place: Place, values: Any) -> Iterator[_Leaf]:
    """Of what an optimizer keeps of a parameter: mostly tensors by name, but it may keep anything."""
    if isinstance(values, torch.Tensor):
        yield _Leaf(place, values, local(values))
    elif isinstance(values, dict | list | tuple):
        yield _Leaf(place, type(values), None)  # an empty one has a form, too
        for key, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from _values((*place, key), value)
    else:
        yield _Leaf(place, values, None)


def _mark(leaf: _Leaf) -> Mark:
    """All that the form of a leaf depends on. Which tensors are tied is in their addresses."""
    place, value, held = leaf
    if held is None:
        return place, type(value), value
    spec = value._spec if is_spread(value) else None
    return place, type(value), spec, held.data_ptr(), held.dtype, held.shape, held.stride()


def _name_of(form: dict[str, Any]) -> str | None:
    """Nothing where this worker holds nothing of a tensor."""
    return form["tensor"] if "tensor" in form else next((name for name, *_ in form["pieces"]), None)


def _named(names: list[str | None], leaves: list[_Leaf]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, leaf in zip(names, leaves, strict=True):
        if name is not None and leaf.held is not None:
            yield name, leaf.held
