"""How many bytes of gradients each worker sends and receives in a step: arithmetic of the plan that it follows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quorate.core.generation import MeshShape
from quorate.lanes.chunks import cut, plan_exchange


@dataclass(frozen=True)
class Traffic:
    """Bytes of one member in one step."""

    sends: int
    receives: int


def ring_traffic(buckets: Sequence[tuple[int, int]], hosting: Sequence[range]) -> tuple[Traffic, ...]:
    """For each position of the ring; `buckets` are (elements, bytes of one element)."""
    lanes = sum(len(hosted) for hosted in hosting)
    sizes = [0] * lanes
    for elements, itemsize in buckets:
        for chunk, part in enumerate(cut(elements, lanes)):
            sizes[chunk] += (part.stop - part.start) * itemsize
    return tuple(
        Traffic(
            sum(sizes[visit.chunk] for visit in visits if visit.sends),
            sum(sizes[visit.chunk] for visit in visits if visit.receives),
        )
        for visits in plan_exchange(hosting)
    )


def mesh_traffic(shape: MeshShape, weights: int, gradients: int, gathers: int = 2) -> int:
    """What a worker of a mesh sends in a forward and a backward pass: its shard of the weights, each time that they are
    gathered, of the gradients all but its shard, and that shard's to the replicas. Bytes are those of all shards."""
    sent = (gathers * weights + gradients) * (shape.shard - 1) // shape.shard
    return sent + 2 * gradients * (shape.replicate - 1) // (shape.replicate * shape.shard)


def tensor_traffic(exchanged: Mapping[str, int], tensor: int) -> int:
    """What a worker sends in collectives of the tensor dimension, to which it gives so many bytes."""
    share = (tensor - 1) / tensor
    factors = {
        "all_reduce": 2 * share,
        "all_gather_into_tensor": tensor - 1,
        "reduce_scatter_tensor": share,
        "all_to_all_single": share,
    }
    return round(sum(factors.get(name, 0) * size for name, size in exchanged.items()))
