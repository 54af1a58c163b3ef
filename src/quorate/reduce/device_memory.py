"""The memory of a device, as far as the other workers of its host may read it.

Whoever shares a piece passes a descriptor, and whoever has mapped it keeps it: a piece is gone with the last process
that holds it, never under a reader.
"""

import os
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from quorate.reduce.memory import zeros
from quorate.reduce.reduction import add_up
from quorate.wire.shared_memory import Segment


class NotShareable(Exception):  # noqa: N818 (a happening, not a mistake)
    """Why the others cannot read the memory of a device, in words."""


class DeviceMemory(Protocol):
    """What the workers of one host do with the memory of their devices. All tensors are flat."""

    def place(self) -> str:
        """Which device it is, by a name that all processes of the host have for it. NotShareable if others cannot see
        what is there at all."""
        ...

    def create(self, size: int) -> tuple[torch.Tensor, int]:
        """So many zero bytes, and a descriptor by which another process maps them; the caller closes it.
        NotShareable if there is no such memory."""
        ...

    def adopt(self, descriptor: int, size: int) -> torch.Tensor:
        """The bytes that another worker has created, to be read. The descriptor stays the caller's."""
        ...

    def wait(self) -> None:
        """Return when all that this thread has begun on the device is done."""
        ...

    def add_up(self, terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """One term after the other, each addition rounded to the type of `out`."""
        ...

    def zeros_on_host(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the host from and to which the device copies fast."""
        ...

    def pin(self, region: memoryview) -> Callable[[], None]:
        """Let the device copy fast from and to shared memory of the host, if it can. The call that it gives ends it."""
        ...


class HostMemory:
    """The host's own memory: what a processor shares, and what stands for a device in tests."""

    def place(self) -> str:
        return "host"

    def create(self, size: int) -> tuple[torch.Tensor, int]:
        segment = Segment.create(size)
        return torch.frombuffer(segment.shared(), dtype=torch.uint8), segment.descriptor

    def adopt(self, descriptor: int, size: int) -> torch.Tensor:
        segment = Segment.adopt(os.dup(descriptor), size)
        try:
            return torch.frombuffer(segment.shared(), dtype=torch.uint8)
        finally:
            segment.close()

    def wait(self) -> None:
        """Everything is done."""

    def add_up(self, terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        add_up(terms[0], terms[1:], out)

    def zeros_on_host(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return zeros(size, dtype)

    def pin(self, region: memoryview) -> Callable[[], None]:  # noqa: ARG002
        return _nothing


def _nothing() -> None:
    """Nothing is to be undone."""
