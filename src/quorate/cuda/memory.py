"""The memory of a GPU, shared by descriptors: an allocation lives until the last process that has mapped it lets go.

So a worker that is killed takes nothing away from one that reads what it has shared. (CUDA's older way of sharing, by
handles of `cudaMalloc`ed memory, leaves that case undefined.)

The few calls of the CUDA driver that torch has no words for are made by `ctypes`, since torch brings the driver's
library along but no binding of it. Constants and structures are those of `cuda.h`, section "Virtual Memory Management";
they have not changed since CUDA 11.4.
"""

import ctypes
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from quorate.collectives.memory import NotShareable
from quorate.collectives.reduction import add_up

log = logging.getLogger(__name__)

_SUCCESS = 0
OUT_OF_MEMORY = 2
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_AND_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE
HAS_VIRTUAL_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
HAS_DESCRIPTORS = 103  # CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED

_Word = ctypes.c_ulonglong  # CUdeviceptr, CUmemGenericAllocationHandle, flags


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationFlags(ctypes.Structure):
    """CUmemAllocationProp.allocFlags."""

    _fields_ = (
        ("compression_type", ctypes.c_ubyte),
        ("gpu_direct_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", Location),
        ("win32_handle_meta_data", ctypes.c_void_p),
        ("flags", AllocationFlags),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


_CALLS: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDeviceGetAttribute": (ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int),
    "cuDeviceGetUuid_v2": (ctypes.c_void_p, ctypes.c_int),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuMemGetAllocationGranularity": (
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.POINTER(AllocationProperties),
        ctypes.c_int,
    ),
    "cuMemCreate": (ctypes.POINTER(_Word), ctypes.c_size_t, ctypes.POINTER(AllocationProperties), _Word),
    "cuMemRelease": (_Word,),
    "cuMemExportToShareableHandle": (ctypes.c_void_p, _Word, ctypes.c_int, _Word),
    "cuMemImportFromShareableHandle": (ctypes.POINTER(_Word), ctypes.c_void_p, ctypes.c_int),
    "cuMemAddressReserve": (ctypes.POINTER(_Word), ctypes.c_size_t, ctypes.c_size_t, _Word, _Word),
    "cuMemAddressFree": (_Word, ctypes.c_size_t),
    "cuMemMap": (_Word, ctypes.c_size_t, ctypes.c_size_t, _Word, _Word),
    "cuMemUnmap": (_Word, ctypes.c_size_t),
    "cuMemSetAccess": (_Word, ctypes.c_size_t, ctypes.POINTER(Access), ctypes.c_size_t),
    "cuMemHostRegister_v2": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint),
    "cuMemHostUnregister": (ctypes.c_void_p,),
}


class DriverError(Exception):
    """A call of the driver failed; `code` is its CUresult, or 0 where the call itself is not there."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class Driver:
    """Device number `ordinal` of those that this process sees. Every call that fails raises DriverError."""

    def __init__(self, library: Any, ordinal: int = 0) -> None:
        self._library = library
        for name, arguments in _CALLS.items():
            try:
                call = getattr(library, name)
            except AttributeError:
                raise DriverError(f"the driver is too old: it has no {name}") from None
            call.argtypes, call.restype = arguments, ctypes.c_int
        self._call("cuInit", 0)
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        self._device = device.value
        self._properties = AllocationProperties(_PINNED, _DESCRIPTOR, Location(_DEVICE, self._device), None)

    def attribute(self, number: int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), number, self._device)
        return value.value

    def uuid(self) -> str:
        """The same in every process, whichever devices that sees."""
        content = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid_v2", ctypes.cast(content, ctypes.c_void_p), self._device)
        return bytes(content).hex()

    def rounded(self, size: int) -> int:
        """So many bytes, or the few more that the driver hands out."""
        unit = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(self._properties), _MINIMUM)
        return -(-max(size, 1) // unit.value) * unit.value

    def create(self, size: int) -> int:
        """A handle of so many bytes of the device, to be released."""
        handle = _Word()
        self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), 0)
        return handle.value

    def exported(self, handle: int) -> int:
        """A descriptor that stands for the memory, to be closed."""
        descriptor = ctypes.c_int(-1)
        self._call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, _DESCRIPTOR, 0)
        return descriptor.value

    def imported(self, descriptor: int) -> int:
        """A handle of what another process has exported, to be released."""
        handle = _Word()
        # The descriptor itself goes where the signature has a pointer.
        self._call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(descriptor), _DESCRIPTOR)
        return handle.value

    def release(self, handle: int) -> None:
        """Let go of a handle. What is mapped stays until it is unmapped."""
        self._call("cuMemRelease", handle)

    def map(self, handle: int, size: int) -> int:
        """The address at which this process sees the memory now."""
        address = _Word()
        self._call("cuMemAddressReserve", ctypes.byref(address), size, 0, 0, 0)
        try:
            self._call("cuMemMap", address.value, size, 0, handle, 0)
        except DriverError:
            self._call("cuMemAddressFree", address.value, size)
            raise
        try:
            access = Access(Location(_DEVICE, self._device), _READ_AND_WRITE)
            self._call("cuMemSetAccess", address.value, size, ctypes.byref(access), 1)
        except DriverError:
            self.unmap(address.value, size)
            raise
        return address.value

    def unmap(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", address, size)
        self._call("cuMemAddressFree", address, size)

    def register(self, address: int, size: int) -> None:
        """Pin pages of the host."""
        self._call("cuMemHostRegister_v2", address, size, _PORTABLE)

    def unregister(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != _SUCCESS:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise DriverError(f"{name} answers {(text.value or b'error').decode()} ({code})", code)


@functools.cache
def load_driver() -> Driver:
    """The driver, for the one device that a worker sees."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(str(error)) from None
    return Driver(library)


# --- what workers of one host share

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
