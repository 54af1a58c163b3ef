"""The few calls of the CUDA driver that torch has no words for: memory that other processes map.

By `ctypes`, since torch brings the driver's library along but no binding of it. Constants and structures are those of
`cuda.h`, section "Virtual Memory Management"; they have not changed since CUDA 11.4.
"""

import ctypes
import functools
from typing import Any

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
