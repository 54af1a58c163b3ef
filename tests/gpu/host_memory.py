"""The memory of a device that is the host's, and yet shared by descriptors as that of a GPU is."""

import os
from collections.abc import Callable, Sequence

import torch

from quorate.collectives.memory import zeros
from quorate.collectives.reduction import add_up
from quorate.wire.shared_memory import Segment


class HostMemory:
    """A `DeviceMemory` that any process of the host can map."""

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

    def pin(self, region: memoryview) -> Callable[[], None]:
        return lambda: None
