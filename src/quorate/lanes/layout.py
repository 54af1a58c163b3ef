"""Where the buckets of one lane lie in a piece of memory: every worker comes to the same places by itself."""

from collections.abc import Sequence
from dataclasses import dataclass

from quorate.lanes.buckets import Bucket

ALIGNMENT = 64
"""A cache line: two workers that write to neighbouring buckets do not take turns on one."""


@dataclass(frozen=True)
class Layout:
    """The byte at which each bucket begins, the scratch space behind them, and the size of it all."""

    offsets: tuple[int, ...]
    scratch_offset: int
    scratch_size: int

    @property
    def size(self) -> int:
        """Bytes for one lane."""
        return _aligned(self.scratch_offset + self.scratch_size)


def lay_out(plan: Sequence[Bucket], itemsizes: Sequence[int], scratch_size: int) -> Layout:
    """One bucket behind the other, each beginning at a cache line."""
    offsets, end = [], 0
    for bucket, itemsize in zip(plan, itemsizes, strict=True):
        offsets.append(end)
        end = _aligned(end + bucket.numel * itemsize)
    return Layout(tuple(offsets), end, scratch_size)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
