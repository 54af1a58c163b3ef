"""The memory of a GPU, shared by descriptors: an allocation lives until the last process that has mapped it lets go.

So a worker that is killed takes nothing away from one that reads what it has shared. (CUDA's older way of sharing, by
handles of `cudaMalloc`ed memory, leaves that case undefined.)
"""

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from quorate.reduce.cuda_driver import (
    HAS_DESCRIPTORS,
    HAS_VIRTUAL_MEMORY,
    OUT_OF_MEMORY,
    Driver,
    DriverError,
    load_driver,
)
from quorate.reduce.memory import NotShareable
from quorate.reduce.reduction import add_up

log = logging.getLogger(__name__)


_left: list[tuple[Driver, int, int, torch.device]] = []
"""What could not be unmapped when it was no longer used."""
_pinned: list[memoryview] = []
"""What the driver has not let go: another mapping at this address would be taken for it, and the old pages copied."""


class CudaMemory:
    """A `DeviceMemory` of the one GPU that this process sees. Made once in a process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def place(self) -> str:
        with _in_words():
            driver = load_driver()
            if not driver.attribute(HAS_VIRTUAL_MEMORY) or not driver.attribute(HAS_DESCRIPTORS):
                raise NotShareable("its GPU has no memory that another process could map")
            return driver.uuid()

    def create(self, size: int) -> tuple[torch.Tensor, int]:
        for mapping in [_left.pop() for _ in range(len(_left))]:
            _unmap(*mapping)
        with _in_words():
            driver = load_driver()
            size_there = driver.rounded(size)
            handle = _created(driver, size_there)
            try:
                piece = self._mapped(driver, handle, size_there)
                piece.zero_()
                return piece[:size], driver.exported(handle)
            finally:
                driver.release(handle)

    def adopt(self, descriptor: int, size: int) -> torch.Tensor:
        with _in_words():
            driver = load_driver()
            handle = driver.imported(descriptor)
            try:
                return self._mapped(driver, handle, driver.rounded(size))[:size]
            finally:
                driver.release(handle)

    def wait(self) -> None:
        begun = torch.cuda.Event()  # type: ignore[no-untyped-call]
        begun.record()
        begun.synchronize()

    def add_up(self, terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        add_up(terms[0], terms[1:], out)

    def zeros_on_host(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, pin_memory=True)

    def pin(self, region: memoryview) -> Callable[[], None]:
        address, size = torch.frombuffer(region, dtype=torch.uint8).data_ptr(), len(region)
        try:
            driver = load_driver()
            driver.register(address, size)
        except DriverError as error:
            log.info("copies between the host and the GPU are slower than they could be: %s", error)
            return lambda: None
        return lambda: _unpin(driver, address, region)

    def _mapped(self, driver: Driver, handle: int, size: int) -> torch.Tensor:
        """A tensor over the memory; unmapped when the last view of it is gone."""
        owner = _Mapping(driver.map(handle, size), size)
        weakref.finalize(owner, _unmap, driver, owner.address, size, self._device).atexit = False
        tensor = torch.as_tensor(owner, device=self._device)
        if tensor.data_ptr() != owner.address:
            raise NotShareable("torch takes memory that is shared for that of another GPU")
        return tensor


class _Mapping:
    """What torch makes a tensor of, without a copy; the tensor's memory keeps it."""

    def __init__(self, address: int, size: int) -> None:
        self.address = address
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


@contextmanager
def _in_words() -> Iterator[None]:
    """What the driver or torch cannot do is a reason to go another way."""
    try:
        yield
    except (DriverError, RuntimeError, TypeError) as error:
        raise NotShareable(f"the memory of its GPU cannot be shared: {error}") from None


def _created(driver: Driver, size: int) -> int:
    try:
        return driver.create(size)
    except DriverError as error:
        if error.code != OUT_OF_MEMORY:
            raise
    # Torch may hold what it no longer needs.
    torch.cuda.empty_cache()
    return driver.create(size)


def _unmap(driver: Driver, address: int, size: int, device: torch.device) -> None:
    try:
        if torch.cuda.is_current_stream_capturing() or threading.current_thread() is not threading.main_thread():
            # Garbage is collected at any time by any thread, and whoever waits for a device ends its capture.
            _left.append((driver, address, size, device))
            return
        # What still runs may read there.
        torch.cuda.synchronize(device)
        driver.unmap(address, size)
    except (DriverError, RuntimeError) as error:  # of a GPU that is lost, say: that is told elsewhere
        log.info("shared memory of the GPU was not unmapped: %s", error)


def _unpin(driver: Driver, address: int, region: memoryview) -> None:
    try:
        driver.unregister(address)
    except DriverError as error:
        log.info("memory that was pinned for the GPU was not let go: %s", error)
        _pinned.append(region)
