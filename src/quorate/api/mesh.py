"""How a model may be laid out over many GPUs: pure arithmetic, in bytes.

Weights, gradients and optimizer state are cut into `shard` parts; each of these is cut `tensor` times across, with the
activations; and all of it is there `replicate` times. While a block is computed, its weights are gathered.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from quorate.core.mesh import MeshShape
from quorate.lanes.traffic import mesh_traffic

HOST = 8
"""GPUs of one host, between which gathering is fast."""
MOST_TENSOR = 8


@dataclass(frozen=True)
class ModelNeeds:
    """What one micro-batch on a GPU by itself needs. `weight_copies`: the weights in the type in which they are
    multiplied, as far as these are kept. `gathered` is what is whole at a time when the rest is sharded: the block that
    is computed, the next one, their gradients, and what lies outside of blocks. `travelling`: all weights, as they are
    gathered, in 16 bits if `in_bf16`."""

    weights: int
    gradients: int
    optimizer: int
    weight_copies: int
    gathered: int
    travelling: int
    activations: int
    in_bf16: bool = False


@dataclass(frozen=True)
class Mesh:
    """So many GPUs, and what each of them needs and sends in a step."""

    shape: MeshShape
    bytes: int
    sends: int
    fits: bool
    in_bf16: bool

    @property
    def strategy(self) -> str:
        """As it is written in a job file."""
        shape = self.shape
        if shape.parts == 1:
            return "strategy: ddp" if shape.replicate > 1 else "strategy: ring"
        others = [f"{key}: {size}" for key in ("replicate", "tensor") if (size := getattr(shape, key)) > 1]
        others += ["gather: bf16"] if self.in_bf16 else []
        return f"strategy: {{{', '.join(['kind: fsdp', f'shard: {shape.shard}', *others])}}}"


def propose_mesh(needs: ModelNeeds, gpus: int, room: int) -> Mesh:
    """The layout that fits with the least communication; if none fits, the one that needs the least memory.

    Replicas exchange gradients alone, so they come first; then shards within a host, then more shards; and tensors are
    cut only where that is not enough.
    """
    if gpus < 1:
        raise ValueError(f"a mesh has one GPU at least, not {gpus}")
    meshes = [_mesh(needs, gpus, shard, tensor, room) for shard, tensor in _cuts(gpus)]
    fitting = [mesh for mesh in meshes if mesh.fits]
    if not fitting:
        return min(meshes, key=lambda mesh: (mesh.bytes, mesh.shape.tensor, mesh.shape.shard))
    return min(fitting, key=lambda mesh: (mesh.shape.tensor, _preference(mesh.shape.shard)))


def memory_each(needs: ModelNeeds, shard: int, tensor: int = 1) -> int:
    """Bytes on each GPU."""
    state = needs.weights + needs.gradients + needs.optimizer
    beside = needs.weight_copies if shard == 1 else needs.gathered
    return -(-state // (shard * tensor)) - (-(beside + needs.activations) // tensor)


def _cuts(gpus: int) -> Iterator[tuple[int, int]]:
    """Every (shard, tensor) that leaves a whole number of replicas."""
    for tensor in (1, 2, 4, MOST_TENSOR):
        if gpus % tensor == 0:
            yield from ((shard, tensor) for shard in range(1, gpus // tensor + 1) if gpus // tensor % shard == 0)


def _preference(shard: int) -> tuple[int, int]:
    """No shards; then as many as a host has, since more leave more room; then as few as will do."""
    if shard == 1:
        return 0, 0
    return (1, -shard) if shard <= HOST else (2, shard)


def _mesh(needs: ModelNeeds, gpus: int, shard: int, tensor: int, room: int) -> Mesh:
    shape = MeshShape(gpus // (shard * tensor), shard, tensor)
    size = memory_each(needs, shard, tensor)
    sends = mesh_traffic(shape, needs.travelling // tensor, needs.gradients // tensor)
    return Mesh(shape, size, sends, size <= room, needs.in_bf16)
