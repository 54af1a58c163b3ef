"""Which tensors are exchanged together, and where they lie.

Another cut gives other bits, so buckets depend on shapes and a key alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MEBIBYTE = 2**20
ALIGNMENT = 64
"""A cache line: two workers that write to neighbouring buckets do not take turns on one."""
MEAN, LANE_0 = "mean", "lane 0"
"""What becomes of a buffer of the model that lanes have changed differently, by the word of the task."""


def padding(nbytes: int, itemsize: int) -> int:
    """So many elements follow a tensor in flat memory, so that the next begins where kernels like it to."""
    return -nbytes % ALIGNMENT // itemsize


@dataclass(frozen=True)
class TensorShape:
    """What a plan needs to know of a tensor."""

    name: str
    dtype: str
    itemsize: int
    numel: int

    @property
    def nbytes(self) -> int:
        return self.itemsize * self.numel


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies in its bucket; `index` is its place in the sequence that was planned."""

    name: str
    index: int
    offset: int
    numel: int

    @property
    def place(self) -> slice:
        return slice(self.offset, self.offset + self.numel)


@dataclass(frozen=True)
class Bucket:
    """Tensors of one type that share a flat buffer of `numel` elements."""

    dtype: str
    slots: tuple[Slot, ...]
    numel: int


def plan_buckets(tensors: Sequence[TensorShape], bucket_mb: float) -> tuple[Bucket, ...]:
    """Buckets of at most `bucket_mb` MiB in reverse registration order: the order in which gradients become ready.

    A new one begins where the type changes; a tensor larger than a bucket has its own.
    """
    if not bucket_mb > 0:
        raise ValueError(f"bucket_mb is {bucket_mb}: it must be above 0")
    groups: list[list[int]] = []
    room = 0.0
    for index in reversed(range(len(tensors))):
        tensor = tensors[index]
        if not groups or tensors[groups[-1][-1]].dtype != tensor.dtype or tensor.nbytes > room:
            groups.append([])
            room = bucket_mb * MEBIBYTE
        groups[-1].append(index)
        room -= tensor.nbytes
    return tuple(_bucket(tensors, group) for group in groups)


def _bucket(tensors: Sequence[TensorShape], indices: Sequence[int]) -> Bucket:
    slots: list[Slot] = []
    offset = 0
    for index in indices:
        slots.append(Slot(tensors[index].name, index, offset, tensors[index].numel))
        offset += tensors[index].numel
    return Bucket(tensors[indices[0]].dtype, tuple(slots), offset)


@dataclass(frozen=True)
class Layout:
    """Where the buckets of one lane lie in a piece of memory: the byte at which each begins, and the size of it all.

    Every worker computes the same places by itself.
    """

    offsets: tuple[int, ...]
    size: int


def lay_out(plan: Sequence[Bucket], itemsizes: Sequence[int]) -> Layout:
    """One bucket behind the other, each beginning at a cache line."""
    offsets, end = [], 0
    for bucket, itemsize in zip(plan, itemsizes, strict=True):
        offsets.append(end)
        end += -(-bucket.numel * itemsize // ALIGNMENT) * ALIGNMENT
    return Layout(tuple(offsets), max(end, ALIGNMENT))
