"""What every kind of device memory must do. That of a GPU is tried on a driver that hands out memory of the host."""

import ctypes
import gc
import mmap
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpu.host_memory import HostMemory
from quorate.collectives.memory import DeviceMemory, NotShareable
from quorate.cuda import memory as cuda_memory
from quorate.cuda.memory import OUT_OF_MEMORY, CudaMemory, DriverError
from wire.pairs import open_descriptors

UNIT = 2**16
SIZE = UNIT + 5


class HostDriver:
    """A driver whose memory is a memory file; a handle is a descriptor of it."""

    def __init__(self) -> None:
        self.mapped: dict[int, mmap.mmap] = {}
        self.handles: set[int] = set()
        self.fails: list[tuple[str, int]] = []
        self.registered: set[int] = set()

    def attribute(self, number: int) -> int:
        return 1

    def uuid(self) -> str:
        return "a GPU"

    def rounded(self, size: int) -> int:
        return -(-size // UNIT) * UNIT

    def create(self, size: int) -> int:
        self._fail("create")
        handle = os.memfd_create("gpu")
        os.ftruncate(handle, size)
        self.handles.add(handle)
        return handle

    def exported(self, handle: int) -> int:
        self._fail("exported")
        return os.dup(handle)

    def imported(self, descriptor: int) -> int:
        self._fail("imported")
        handle = os.dup(descriptor)
        self.handles.add(handle)
        return handle

    def release(self, handle: int) -> None:
        self.handles.remove(handle)
        os.close(handle)

    def map(self, handle: int, size: int) -> int:
        self._fail("map")
        content = mmap.mmap(handle, size)
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(content))
        self.mapped[address] = content
        return address

    def unmap(self, address: int, size: int) -> None:
        assert len(self.mapped[address]) == size
        del self.mapped[address]

    def register(self, address: int, size: int) -> None:
        self._fail("register")
        self.registered.add(address)

    def unregister(self, address: int) -> None:
        self._fail("unregister")
        self.registered.remove(address)

    def _fail(self, call: str) -> None:
        if self.fails and self.fails[0][0] == call:
            raise DriverError(f"{call} answers no", self.fails.pop(0)[1])


def as_tensor(owner: Any, device: torch.device) -> torch.Tensor:
    """As torch does for a GPU: without a copy, and keeping the owner for as long as the tensor's memory is used."""
    found = owner.__cuda_array_interface__
    assert (found["typestr"], found["strides"]) == ("|u1", None)
    content = (ctypes.c_ubyte * found["shape"][0]).from_address(found["data"][0])
    content.owner = owner
    return torch.frombuffer(content, dtype=torch.uint8)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> HostDriver:
    found = HostDriver()
    monkeypatch.setattr(cuda_memory, "load_driver", lambda: found)
    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


@pytest.fixture(params=["host", "cuda"])
def memory(request: pytest.FixtureRequest, driver: HostDriver) -> Iterator[DeviceMemory]:
    before = len(open_descriptors())
    yield HostMemory() if request.param == "host" else CudaMemory(torch.device("cpu"))
    gc.collect()
    assert not driver.mapped
    assert not driver.handles
    assert len(open_descriptors()) == before


def test_what_one_creates_another_reads_for_as_long_as_it_likes(memory: DeviceMemory) -> None:
    assert memory.place()
    own, descriptor = memory.create(SIZE)
    assert own.numel() == SIZE
    assert not own.any()
    read = memory.adopt(descriptor, SIZE)
    os.close(descriptor)
    own.copy_(torch.arange(SIZE) % 251)
    expected = own.clone()
    assert torch.equal(read, expected)
    part = read[3:].view(torch.uint8)[:-1]
    del own, read
    assert torch.equal(part, expected[3:-1])


def test_it_adds_in_order(memory: DeviceMemory) -> None:
    memory.place()
    terms = [torch.tensor([value]) for value in (1e8, -1e8, 1.0)]
    out = torch.empty(1)
    memory.add_up(terms, out)
    assert out.item() == 1.0
    memory.add_up(terms[::-1], out)
    assert out.item() == 0.0


def test_shared_memory_is_pinned_until_it_is_let_go(memory: DeviceMemory, driver: HostDriver) -> None:
    unpin = memory.pin(memoryview(mmap.mmap(-1, mmap.PAGESIZE)))
    assert len(driver.registered) == isinstance(memory, CudaMemory)
    unpin()
    assert not driver.registered


@pytest.mark.parametrize("call", ["create", "exported", "map"])
def test_a_driver_that_refuses_is_a_reason_and_leaves_nothing(call: str, driver: HostDriver) -> None:
    driver.fails = [(call, 801)]
    with pytest.raises(NotShareable, match=f"cannot be shared: {call} answers no"):
        CudaMemory(torch.device("cpu")).create(SIZE)
    gc.collect()
    assert not driver.mapped
    assert not driver.handles


def test_what_torch_holds_in_vain_is_given_back_before_memory_is_said_to_be_short(
    driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    driver.fails = [("create", OUT_OF_MEMORY)]
    _, descriptor = CudaMemory(torch.device("cpu")).create(SIZE)
    os.close(descriptor)
    assert emptied == [True]


def test_memory_that_cannot_be_pinned_is_used_as_it_is(driver: HostDriver) -> None:
    driver.fails = [("register", 801)]
    CudaMemory(torch.device("cpu")).pin(memoryview(mmap.mmap(-1, mmap.PAGESIZE)))()
    assert not driver.registered


def test_what_stays_pinned_stays_mapped(driver: HostDriver) -> None:
    """Else another mapping could come to lie there, and the GPU would copy pages that are no longer of it."""
    driver.fails = [("unregister", 201)]
    content = mmap.mmap(-1, mmap.PAGESIZE)
    CudaMemory(torch.device("cpu")).pin(memoryview(content))()
    gc.collect()
    with pytest.raises(BufferError):
        content.close()


def test_nothing_is_unmapped_by_another_thread(driver: HostDriver) -> None:
    """It may be that the first one captures a graph, which ends when anybody waits for the device."""
    memory = CudaMemory(torch.device("cpu"))
    piece, descriptor = memory.create(SIZE)
    os.close(descriptor)
    held = [piece]
    del piece
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert len(driver.mapped) == 1
    another, descriptor = memory.create(SIZE)
    os.close(descriptor)
    assert list(driver.mapped) == [another.data_ptr()]


def test_nothing_is_unmapped_while_a_graph_is_captured(driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = CudaMemory(torch.device("cpu"))
    piece, descriptor = memory.create(SIZE)
    os.close(descriptor)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    del piece
    gc.collect()
    assert len(driver.mapped) == 1
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    another, descriptor = memory.create(SIZE)
    os.close(descriptor)
    assert list(driver.mapped) == [another.data_ptr()]
