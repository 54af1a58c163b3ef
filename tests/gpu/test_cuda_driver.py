"""The driver's calls, against a library that keeps account of what it has handed out."""

import ctypes
import itertools
from collections import Counter
from typing import Any

import pytest

from quorate.cuda import memory as cuda_memory
from quorate.cuda.memory import Access, AllocationProperties, Driver, DriverError, Location

UNIT = 2**21


class Library:
    """Answers as the driver does; one call fails if it is named, with an error of its own."""

    def __init__(self, fails: str = "", code: int = 801) -> None:
        self._fails, self._code = fails, code
        self._numbers = itertools.count(0x10000, UNIT)
        self.asked: list[tuple[int, int, int]] = []
        self.held: Counter[str] = Counter()
        for name in cuda_memory._CALLS:
            # A function has attributes of its own, as one of ctypes has.
            setattr(self, name, self._function(name))

    def _function(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == self._fails:
                return self._code
            handler = getattr(self, f"_{name}", None)
            if handler is not None:
                handler(*arguments)
            return 0

        return call

    def _cuGetErrorName(self, code: int, text: Any) -> None:
        text._obj.value = f"CUDA_ERROR_{code}".encode()

    def _cuDeviceGet(self, device: Any, ordinal: int) -> None:
        device._obj.value = ordinal

    def _cuMemGetAllocationGranularity(self, unit: Any, properties: Any, _: int) -> None:
        found = properties._obj
        self.asked.append((found.type, found.requested_handle_types, found.location.type))
        unit._obj.value = UNIT

    def _cuMemCreate(self, handle: Any, size: int, properties: Any, flags: int) -> None:
        assert size % UNIT == 0
        assert flags == 0
        self._hand_out("handles", handle)

    def _cuMemImportFromShareableHandle(self, handle: Any, descriptor: Any, kind: int) -> None:
        assert (descriptor.value, kind) == (77, 1)
        self._hand_out("handles", handle)

    def _cuMemRelease(self, _: int) -> None:
        self.held["handles"] -= 1

    def _cuMemExportToShareableHandle(self, descriptor: Any, _: int, kind: int, flags: int) -> None:
        assert (kind, flags) == (1, 0)
        descriptor._obj.value = 78

    def _cuMemAddressReserve(self, address: Any, *_: int) -> None:
        self._hand_out("addresses", address)

    def _cuMemAddressFree(self, *_: int) -> None:
        self.held["addresses"] -= 1

    def _cuMemMap(self, *_: int) -> None:
        self.held["mappings"] += 1

    def _cuMemUnmap(self, *_: int) -> None:
        self.held["mappings"] -= 1

    def _cuMemSetAccess(self, _: int, __: int, access: Any, count: int) -> None:
        assert (access._obj.flags, access._obj.location.type, count) == (3, 1, 1)

    def _hand_out(self, what: str, number: Any) -> None:
        number._obj.value = next(self._numbers)
        self.held[what] += 1


def test_structures_are_as_long_as_in_the_drivers_header() -> None:
    assert [ctypes.sizeof(kind) for kind in (Location, AllocationProperties, Access)] == [8, 32, 12]
    assert AllocationProperties.win32_handle_meta_data.offset == 16
    assert AllocationProperties.flags.offset == 24


def test_what_is_created_or_imported_is_mapped_and_given_back() -> None:
    library = Library()
    driver = Driver(library)
    size = driver.rounded(UNIT + 1)
    assert size == 2 * UNIT
    assert library.asked == [(1, 1, 1)]  # pinned, by a descriptor, on a device
    created, imported = driver.create(size), driver.imported(77)
    assert driver.exported(created) == 78
    addresses = [driver.map(handle, size) for handle in (created, imported)]
    assert len(set(addresses)) == 2
    for handle in (created, imported):
        driver.release(handle)
    assert library.held == {"handles": 0, "addresses": 2, "mappings": 2}
    for address in addresses:
        driver.unmap(address, size)
    assert not any(library.held.values())


@pytest.mark.parametrize("fails", ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"])
def test_a_mapping_that_fails_halfway_leaves_nothing_and_says_which_call_it_was(fails: str) -> None:
    library = Library(fails, code=801)
    driver = Driver(library)
    handle = driver.create(UNIT)
    with pytest.raises(DriverError, match=rf"{fails} answers CUDA_ERROR_801 \(801\)"):
        driver.map(handle, UNIT)
    driver.release(handle)
    assert not any(library.held.values())


def test_a_driver_without_a_call_is_too_old() -> None:
    library = Library()
    del library.cuMemCreate  # type: ignore[attr-defined]
    with pytest.raises(DriverError, match="too old: it has no cuMemCreate"):
        Driver(library)


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", load)
    cuda_memory.load_driver.cache_clear()
    with pytest.raises(DriverError, match=r"libcuda.so.1: cannot open"):
        cuda_memory.load_driver()
