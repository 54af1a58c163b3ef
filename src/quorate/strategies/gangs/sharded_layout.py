"""The state of a gang whose workers hold a part each: parameters, their averages and what optimizers keep of them are
cut over a mesh, and everything else is everybody's."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from quorate.checkpoint.pieces import Box, Shape, pieces_of, storable
from quorate.checkpoint.reshard import join_skeletons
from quorate.checkpoint.tree import Encoded, Place, decode, dotted, encode, tensor_forms
from quorate.core.digests import weights_digest
from quorate.core.errors import UnsupportedModelError
from quorate.core.generation import Generation, MeshShape
from quorate.training.device import digests
from quorate.training.progress import Progress
from quorate.training.replica import Replica
from quorate.training.sharded_tensors import as_piece, box_of, cut_by, is_spread, local
from quorate.training.state_layout import Gather, HeldState, Parts, shared_out

DIMENSIONS = ("replicate", "shard", "tensor")
"""What the dimensions of the mesh are called, in the order in which workers are numbered."""


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
    """Encodes what the workers of one part of the mesh hold of a state: weights, and what optimizers keep of each.

    What they are called and where they lie is worked out once, and again where it has changed: to name and cut the
    tensors of a large model takes tens of milliseconds for which training would stand still.
    """

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


@dataclass(frozen=True)
class Sharded:
    """Every worker writes a share of its part, and whoever holds the same part, in another replica, the rest of it.

    Replicas of a part are compared with each other, and can be each other's donors. A checkpoint is taken up from
    whatever mesh it is of, or of none: each worker reads what it holds.
    """

    replica: Replica
    shape: MeshShape
    rank: int

    def state(self, progress: Progress) -> HeldState:
        state = self.replica.state()
        kept = {name: {"state": of_one.pop("state")} for name, of_one in state["optimizers"].items()}
        large, compared = self._outline.encode({"tensors": state.pop("tensors"), "optimizers": kept})
        rest = encode({"replica": in_pieces(state), "progress": progress.to_dict()})
        encoded = Encoded(join_skeletons([large.skeleton, rest.skeleton]), large.tensors | rest.tensors)
        is_whole, settings = self.shape.parts == 1, self.replica.optimizers.settings.values()
        return HeldState(encoded, compared, self._weights, self.replica.device, is_whole=is_whole, settings=settings)

    def parts(self, held: HeldState, writers: int) -> Parts:
        """Of its own alone. What the same workers hold they share out among themselves, by size."""
        tensors = held.encoded.tensors
        sizes = tuple((name, tensor.numel()) for name, tensor in tensors.items())
        if self._known.get("sizes") != sizes:
            self._known.update(sizes=sizes, own=self._own_share(held))
        own: tuple[str, ...] = self._known["own"]
        return tuple(own if rank == self.rank else () for rank in range(writers))

    def load(self, encoded: Encoded) -> Progress:
        state = decode(encoded.skeleton, encoded.tensors)
        self.replica.load(state["replica"])
        return Progress.from_dict(state["progress"])

    def boxes(self, place: Place, shape: Shape) -> Box | None:
        tensor = self._at(place)
        return None if tensor is None or tuple(tensor.shape) != shape else box_of(tensor)

    def donors(self, generation: Generation) -> Mapping[int, int]:
        """The first who holds the same part where the generation goes on; nobody where that is lost."""
        behind = {generation.position(worker) for worker in generation.behind}
        holders = {position: generation.holders(generation.members[position].part) for position in behind}
        return {position: of[0] for position, of in holders.items() if of}

    def weights_digest(self, gather: Gather) -> str:
        """That of all parts: of another mesh it is another one."""
        part = self.shape.part(self.rank)
        held = ((named(name, tensor, part), local(tensor)) for name, tensor in self.replica.tensors())
        own = json.dumps(digests(held, self.replica.device)).encode()
        return weights_digest({name: digest for told in gather(own) for name, digest in json.loads(told).items()})

    def _own_share(self, held: HeldState) -> tuple[str, ...]:
        tensors = held.encoded.tensors
        by_holders: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}
        for place, form in tensor_forms(held.encoded.skeleton):
            names = [form["tensor"]] if "tensor" in form else list(pieces_of(form))
            holders = self._holders(place, form)
            by_holders.setdefault(holders, {}).update({name: tensors[name] for name in names})
        own: list[str] = []
        for holders, shared in by_holders.items():
            shares = shared_out(shared, [[] for _ in holders])
            own += shares[holders.index(self.rank)]
        return tuple(own)

    def _holders(self, place: Place, form: Mapping[str, Any]) -> tuple[int, ...]:
        """Who else holds what this worker holds of a tensor: all who stand alike in the dimensions that cut it."""
        tensor = self._at(place) if "pieces" in form else None
        if "pieces" in form and (tensor is None or list(tensor.shape) != form["shape"]):
            raise UnsupportedModelError(f"'{dotted(place)}' is cut over the mesh otherwise than its parameter")
        by = frozenset[str]() if tensor is None else cut_by(tensor)
        fixed = [self._coordinate(self.rank)[DIMENSIONS.index(name)] if name in by else None for name in DIMENSIONS]
        return tuple(
            rank
            for rank in range(self.shape.size)
            if all(at is None or at == own for at, own in zip(fixed, self._coordinate(rank), strict=True))
        )

    def _coordinate(self, rank: int) -> tuple[int, int, int]:
        shape = self.shape
        return rank // shape.parts, rank // shape.tensor % shape.shard, rank % shape.tensor

    def _at(self, place: Place) -> torch.Tensor | None:
        """The tensor at a place in the tree of a state; of what an optimizer keeps, the parameter that it is of."""
        match place:
            case ("replica", "tensors", name):
                return self._by_name.get(name)
            case ("replica", "optimizers", optimizer, "state", number, _):
                return self._by_number.get((optimizer, number))
        return None

    @cached_property
    def _outline(self) -> StateOutline:
        return StateOutline(self.shape.part(self.rank))

    @cached_property
    def _known(self) -> dict[str, Any]:
        """Its share of what was last saved, and of which names and sizes that was: they seldom change."""
        return {}

    @cached_property
    def _weights(self) -> frozenset[str]:
        """The names of the weights in all parts."""
        parts = range(self.shape.parts)
        return frozenset(named(name, tensor, part) for name, tensor in self.replica.tensors() for part in parts)

    @cached_property
    def _by_name(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self.replica.tensors() if is_spread(tensor)}

    @cached_property
    def _by_number(self) -> dict[tuple[str, int], torch.Tensor]:
        places = self.replica.optimizers.places().items()
        return {place: parameter for parameter, place in places if is_spread(parameter)}
