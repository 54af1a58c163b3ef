"""A device whose memory the host cannot see, and which counts what is brought from it to the host."""

import mmap
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.overrides import TorchFunctionMode

import quorate
from gpu.host_memory import HostMemory
from quorate.collectives.memory import DeviceMemory
from quorate.replica.device import EVERYTHING, Device, Numbers

KINDS = ("numbers", "content", "same_bits", "move")
FLOORS = tuple(
    str(Path(quorate.__file__).parent / floor)
    for floor in ("task", "replica", "training", "cuda", "own_loop", "strategies")
)
"""Samples and checkpoints are the host's own."""
READS = {"item", "numpy", "tolist", "__float__", "__int__", "__bool__", "equal"}


class CountingDevice(Device):
    """It computes as a CPU does. Its counts are shared with the processes that are forked from this one."""

    name = "counting"
    is_host = False

    def __init__(self) -> None:
        super().__init__()
        self._counts = numpy.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=numpy.int64)
        self.is_reading = False

    @property
    def counts(self) -> dict[str, int]:
        return {kind: int(self._counts[index]) for index, kind in enumerate(KINDS)}

    @property
    def shareable(self) -> DeviceMemory:
        return HostMemory()

    def move(self, batch: Any) -> Any:
        self._count("move")
        return batch

    def numbers(self, scalars: Sequence[torch.Tensor]) -> Numbers:
        self._count("numbers")
        self.is_reading = True
        try:
            return super().numbers(scalars)
        finally:
            self.is_reading = False

    def content(self, tensor: torch.Tensor, part: slice = EVERYTHING) -> memoryview:
        self._count("content")
        self.is_reading = True
        try:
            return memoryview(bytes(super().content(tensor, part)))
        finally:
            self.is_reading = False

    def host_view(self, tensor: torch.Tensor) -> memoryview | None:
        return None

    def same_bits(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
        self._count("same_bits")
        self.is_reading = True
        try:
            return super().same_bits(pairs)
        finally:
            self.is_reading = False

    def _count(self, kind: str) -> None:
        self._counts[KINDS.index(kind)] += 1


class ReadsPast(TorchFunctionMode):
    """Refuses what Quorate reads from a tensor past its device: on another device it would wait there, unseen."""

    def __init__(self, device: CountingDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READS and not self._device.is_reading:
            callers = [frame for frame in traceback.extract_stack()[:-1] if "/torch/" not in frame.filename]
            if callers[-1].filename.startswith(FLOORS):
                raise AssertionError(f"{func.__name__} past the device: {callers[-1]}")
        return func(*args, **(kwargs or {}))
