"""A device that is not the host, with fused optimizers, whose numbers take their time; and which counts who waits."""

import mmap
import threading
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from gpu.host_memory import HostMemory
from quorate.collectives.memory import DeviceMemory
from quorate.replica.device import EVERYTHING, CopyOut, Device, Model, Numbers

FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


class AwayDevice(Device):
    """It computes as a CPU does. `delay`: numbers have arrived when they were looked for so often; whoever asks for
    them before that has waited. Waits are shared with the processes that are forked from this one."""

    name = "away"
    is_host = False

    def __init__(
        self, delay: int = 3, *, channels_last: bool = False, fuses: bool = True, copies_out: bool = True
    ) -> None:
        super().__init__()
        self._copies_out = copies_out
        self._delay = delay
        self._channels_last = channels_last
        self._fuses = fuses
        self._counts = numpy.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=numpy.int64)

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    @property
    def shareable(self) -> DeviceMemory:
        return HostMemory()

    @property
    def waits(self) -> int:
        return int(self._counts[0])

    @property
    def longest_lag(self) -> int:
        """How many transfers were under way at once, at most."""
        return int(self._counts[2])

    @property
    def locked(self) -> int:
        """How often pages of the host were locked."""
        return int(self._counts[3])

    @property
    def copies(self) -> int:
        """How many states it was asked to copy to the host."""
        return int(self._counts[4])

    def lock_pages(self, memory: "numpy.ndarray[Any, Any]") -> None:
        self._counts[3] += 1

    def copy_out(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> CopyOut | None:
        if not self._copies_out:
            return None
        self._counts[4] += 1
        return _LateCopy(pairs)

    def place(self, model: Model) -> Model:
        return model.to(memory_format=torch.channels_last) if self._channels_last else model  # type: ignore[call-overload]

    def tune(self, optimizer: torch.optim.Optimizer) -> None:
        if type(optimizer) in FUSED and self._fuses:
            for group in optimizer.param_groups:
                group["fused"] = True

    def numbers(self, scalars: Sequence[torch.Tensor]) -> Numbers:
        self._counts[1] += 1
        self._counts[2] = max(self._counts[2], self._counts[1])
        return _Late(super().numbers(scalars)(), self._delay, self._counts)

    def content(self, tensor: torch.Tensor, part: slice = EVERYTHING) -> memoryview:
        self._counts[0] += 1
        return memoryview(bytes(super().content(tensor, part)))

    def host_view(self, tensor: torch.Tensor) -> memoryview | None:
        return None

    def same_bits(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
        self._counts[0] += 1
        return super().same_bits(pairs)

    def synchronize(self) -> None:
        self._counts[0] += 1


class _LateCopy:
    """It is made at the last moment: who changes the state without holding that back changes the copy, too."""

    PATIENCE = 0.1

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._pairs = pairs
        self._held = threading.Event()
        self._lock = threading.Lock()
        self._is_done = False

    def hold_back(self) -> None:
        self._copy()
        self._held.set()

    def wait(self) -> None:
        self._held.wait(self.PATIENCE)  # after the last step there is nothing to hold back
        self._copy()

    def is_done(self) -> bool:
        return self._is_done

    def _copy(self) -> None:
        with self._lock, torch.no_grad():
            for target, source in () if self._is_done else self._pairs:
                target.copy_(source)
            self._is_done = True


class _Late(Numbers):
    def __init__(self, numbers: list[float], delay: int, counts: "numpy.typing.NDArray[numpy.int64]") -> None:
        self._numbers, self._delay, self._counts = numbers, delay, counts
        self._is_read = False

    def __call__(self) -> list[float]:
        if not self._is_read:
            self._counts[0] += self._delay > 0
            self._counts[1] -= 1
            self._is_read = True
        return self._numbers.copy()

    def is_there(self) -> bool:
        self._delay -= 1
        return self._delay <= 0
