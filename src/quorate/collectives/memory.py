"""The memory in which lanes collect their gradients, and from which the optimizer reads their sum."""

import mmap
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from quorate.lanes.buckets import Bucket, Layout, lay_out

Allocate = Callable[[int, torch.dtype], torch.Tensor]
"""Gives so many zeros of a type, where the parameters are."""


def zeros(size: int, dtype: torch.dtype) -> torch.Tensor:
    """In the host's memory."""
    return torch.zeros(size, dtype=dtype)


class GradientMemory:
    """One flat tensor for each bucket: of every hosted lane, and of the sum over all lanes.

    Hosted lanes write to `lanes`, and the optimizer reads `total`. It may write there too; `writes_are_slow` says
    whether it had better not, since that costs many times what it usually does.
    """

    def __init__(
        self, lanes: dict[int, tuple[torch.Tensor, ...]], total: tuple[torch.Tensor, ...], writes_are_slow: bool = False
    ) -> None:
        self.lanes = lanes
        self.total = total
        self.writes_are_slow = writes_are_slow

    @classmethod
    def of_process(cls, plan: Sequence[Bucket], lanes: range, allocate: Allocate = zeros) -> "GradientMemory":
        def buckets() -> tuple[torch.Tensor, ...]:
            return tuple(allocate(bucket.numel, dtype_of(bucket)) for bucket in plan)

        return cls({lane: buckets() for lane in lanes}, buckets())


class NotShareable(Exception):  # noqa: N818 (a happening, not a mistake)
    """Why the others cannot read the memory of a device, in words."""


class DeviceMemory(Protocol):
    """What the workers of one host do with the memory of their devices. All tensors are flat.

    Whoever shares a piece passes a descriptor, and whoever has mapped it keeps it: a piece is gone with the last
    process that holds it, never under a reader. Each of these raises NotShareable where it cannot be done.

    `place` says which device it is, by a name that all processes of the host have for it. `create` gives so many zero
    bytes, and a descriptor by which another process maps them, for the caller to close; `adopt` the bytes that another
    worker has created, to be read, and leaves the descriptor the caller's. `wait` returns when all that this thread has
    begun on the device is done; `add_up` rounds each addition to the type of `out`. `zeros_on_host` is memory from and
    to which the device copies fast; `pin` lets it do so with shared memory of the host, if it can, until the call that
    it gives.
    """

    def place(self) -> str: ...

    def create(self, size: int) -> tuple[torch.Tensor, int]: ...

    def adopt(self, descriptor: int, size: int) -> torch.Tensor: ...

    def wait(self) -> None: ...

    def add_up(self, terms: Sequence[torch.Tensor], out: torch.Tensor) -> None: ...

    def zeros_on_host(self, size: int, dtype: torch.dtype) -> torch.Tensor: ...

    def pin(self, region: memoryview) -> Callable[[], None]: ...


def layout_of(plan: Sequence[Bucket]) -> Layout:
    """Where a lane's buckets lie."""
    return lay_out(plan, [dtype_of(bucket).itemsize for bucket in plan])


def buckets_in(
    content: mmap.mmap | bytearray, plan: Sequence[Bucket], layout: Layout, start: int
) -> tuple[torch.Tensor, ...]:
    """The flat tensors of a plan in memory, from a byte on."""
    return tuple(
        # Torch makes no view of nothing: tables by rows and tensors without elements have a place of no size.
        torch.frombuffer(content, dtype=dtype_of(bucket), count=bucket.numel, offset=start + offset)
        if bucket.numel
        else torch.empty(0, dtype=dtype_of(bucket))
        for bucket, offset in zip(plan, layout.offsets, strict=True)
    )


def dtype_of(bucket: Bucket) -> torch.dtype:
    """Torch's type of what lies in a bucket."""
    dtype: torch.dtype = getattr(torch, bucket.dtype.removeprefix("torch."))
    return dtype
