"""The state of a gang whose workers hold a part each: parameters, their averages and what optimizers keep of them are
cut over a mesh, and everything else is everybody's."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from quorate.checkpoint.pieces import Box, Piece, Shape, pieces_of
from quorate.checkpoint.tree import Encoded, Place, decode, dotted, encode, tensor_forms
from quorate.core.cached import cached_property
from quorate.core.digests import weights_digest
from quorate.core.errors import UnsupportedModelError
from quorate.core.generation import Generation, MeshShape
from quorate.replica.device import digests, is_spread, local
from quorate.replica.replica import Replica
from quorate.replica.state_layout import Gather, HeldState, Parts, shared_out
from quorate.task.progress import Progress

DIMENSIONS = ("replicate", "shard", "tensor")
"""What the dimensions of the mesh are called, in the order in which workers are numbered."""


# --- where a part lies in the whole is for torch to say: shards may be uneven, empty, or cut twice along one dimension


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


# --- the state


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


def _tensors_in(value: Any, place: Place = ()) -> Iterator[tuple[Place, torch.Tensor]]:
    """Of what an optimizer keeps of a parameter: mostly tensors by name, but it may keep anything."""
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, dict | list | tuple):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors_in(inner, (*place, key))


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
        encoded = encode({"replica": in_pieces(state), "progress": progress.to_dict()})
        is_whole, settings = self.shape.parts == 1, self.replica.optimizers.settings.values()
        compared = dict(self._compared(state))
        return HeldState(encoded, compared, self._weights, self.replica.device, is_whole=is_whole, settings=settings)

    def _compared(self, state: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """With those who hold the same, by names for people."""
        part = self.shape.part(self.rank)
        for name, tensor in state["tensors"].items():
            yield named(name, tensor, part), local(tensor)
        for optimizer, kept in state["optimizers"].items():
            for place, tensor in _tensors_in(kept["state"]):
                yield named(" ".join(map(str, ("optimizer", optimizer, *place))), tensor, part), local(tensor)

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
