"""The memory in which lanes collect their gradients, and from which the optimizer reads their sum."""

import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from quorate.lanes.buckets import Bucket
from quorate.lanes.layout import Layout, lay_out
from quorate.wire.segment import Segment

Allocate = Callable[[int, torch.dtype], torch.Tensor]
"""Gives so many zeros of a type, where the parameters are."""


def zeros(size: int, dtype: torch.dtype) -> torch.Tensor:
    """In the host's memory."""
    return torch.zeros(size, dtype=dtype)


SCRATCH = 2**20
"""Bytes for each lane, through which everything else is summed."""


class GradientMemory(Protocol):
    """One flat tensor for each bucket: of every hosted lane, and of the sum over all lanes."""

    @property
    def lanes(self) -> Mapping[int, Sequence[torch.Tensor]]:
        """What hosted lanes write to."""
        ...

    @property
    def total(self) -> Sequence[torch.Tensor]:
        """What the optimizer reads. It may write there too; `writes_are_dear` says whether it had better not."""
        ...

    @property
    def writes_are_dear(self) -> bool:
        """Whether a write to the total costs many times what it usually does."""
        ...


@dataclass(frozen=True)
class PlainMemory:
    """Memory of this process alone."""

    lanes: dict[int, tuple[torch.Tensor, ...]]
    total: tuple[torch.Tensor, ...]
    writes_are_dear: bool = False

    @classmethod
    def of(cls, plan: Sequence[Bucket], lanes: range, allocate: Allocate = zeros) -> "PlainMemory":
        """For hosted lanes."""

        def buckets() -> tuple[torch.Tensor, ...]:
            return tuple(allocate(bucket.numel, _dtype(bucket)) for bucket in plan)

        return cls({lane: buckets() for lane in lanes}, buckets())


class SharedMemory:
    """The lanes of all workers of a host, and one total that all of them read.

    Each worker sees the total through a private view: it reads what the others have written there, and what it writes
    itself nobody else sees. So an optimizer that changes gradients in place does no harm to its neighbours, and one
    that does not costs no copy.
    """

    writes_are_dear = True

    def __init__(
        self,
        plan: Sequence[Bucket],
        hosting: Sequence[range],
        position: int,
        lane_segments: Sequence[Segment],
        total_segment: Segment,
    ) -> None:
        layout = layout_of(plan)
        self.all_lanes: dict[int, tuple[torch.Tensor, ...]] = {}
        self.scratch: dict[int, torch.Tensor] = {}
        for lanes, segment in zip(hosting, lane_segments, strict=True):
            content = segment.shared()
            for index, lane in enumerate(lanes):
                self.all_lanes[lane] = _buckets(content, plan, layout, index * layout.size)
                self.scratch[lane] = _scratch(content, layout, index * layout.size)
        self.lanes = {lane: self.all_lanes[lane] for lane in hosting[position]}
        shared, self._private = total_segment.shared(), total_segment.private()
        self.shared_total = _buckets(shared, plan, layout, 0)
        self.total_scratch = _scratch(shared, layout, 0)
        self.total = _buckets(self._private, plan, layout, 0)
        self._versions = [bucket._version for bucket in self.total]

    def forget_own_writes(self, always: bool) -> None:
        """Have the private view show the shared total again. Without `always`, only where torch has written to it."""
        versions = [bucket._version for bucket in self.total]
        if always or versions != self._versions:
            self._versions = versions
            self._private.madvise(mmap.MADV_DONTNEED)


def layout_of(plan: Sequence[Bucket]) -> Layout:
    """Where a lane's buckets lie."""
    return lay_out(plan, [_dtype(bucket).itemsize for bucket in plan], SCRATCH)


def _buckets(content: mmap.mmap, plan: Sequence[Bucket], layout: Layout, start: int) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.frombuffer(content, dtype=_dtype(bucket), count=bucket.numel, offset=start + offset)
        for bucket, offset in zip(plan, layout.offsets, strict=True)
    )


def _scratch(content: mmap.mmap, layout: Layout, start: int) -> torch.Tensor:
    offset = start + layout.scratch_offset
    return torch.frombuffer(content, dtype=torch.uint8, count=layout.scratch_size, offset=offset)


def _dtype(bucket: Bucket) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, bucket.dtype.removeprefix("torch."))
    return dtype
