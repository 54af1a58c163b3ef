"""What of a GPU's device can be seen without a GPU."""

import os
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gang
from bits.bit_tasks import Momentum
from quorate.checkpoint.tensor_file import Arena
from quorate.core.errors import GpuLost, RunError
from quorate.cuda import device as cuda_device
from quorate.cuda.device import CudaDevice, count_differing, oldest_capability
from quorate.data.collate import mapped
from quorate.replica.device import CPU, same_bits
from quorate.worker import assembly

TYPES = (torch.float32, torch.float64)
VALUES = (0.0, -0.0, 1.0, float("nan"), float("inf"))


@given(
    st.lists(
        st.tuples(
            st.sampled_from([(), (0,), (3,), (2, 2)]), st.sampled_from([torch.float32, torch.float64]), st.randoms()
        ),
        min_size=1,
        max_size=6,
    )
)
def test_pairs_are_equal_to_the_last_bit_or_not(drawn: list[Any]) -> None:
    pairs = []
    for shape, dtype, random in drawn:
        count = torch.Size(shape).numel()
        left, right = (
            torch.tensor([random.choice(VALUES) for _ in range(count)], dtype=dtype).view(shape) for _ in range(2)
        )
        pairs.append((left, left.clone() if random.random() < 0.5 else right))
    found = [differing == 0 for differing in count_differing(pairs).tolist()]
    assert found == [same_bits(*pair) for pair in pairs]


class Named(NamedTuple):
    image: torch.Tensor
    label: int


@dataclass
class Sample:
    image: torch.Tensor
    name: str


def test_a_batch_is_moved_with_all_that_is_in_it() -> None:
    one = torch.ones(2)
    batch = {"a": [one, (one, "text")], "b": Named(one, 3), "c": Sample(one, "x"), "d": None}
    moved = mapped(batch, lambda tensor: tensor + 1)
    assert torch.equal(moved["a"][0], one + 1)
    assert torch.equal(moved["a"][1][0], one + 1)
    assert moved["a"][1][1] == "text"
    assert isinstance(moved["b"], Named)
    assert torch.equal(moved["b"].image, one + 1)
    assert isinstance(moved["c"], Sample)
    assert torch.equal(moved["c"].image, one + 1)
    assert moved["d"] is None


@dataclass(frozen=True)
class Counted:
    image: torch.Tensor
    total: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", self.image.sum())


def test_a_batch_is_moved_whatever_its_types_are_made_of() -> None:
    one = torch.ones(2)
    batch = defaultdict(list, {"a": [one]}), Counted(one)
    named, counted = mapped(batch, lambda tensor: tensor + 1)
    assert torch.equal(named["a"][0], one + 1)
    assert named["b"] == []
    assert torch.equal(counted.image, one + 1)
    assert counted.total.item() == 3
    assert torch.equal(batch[0]["a"][0], one)
    assert torch.equal(batch[1].image, one)


def test_without_a_gpu_it_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(RunError, match="this torch is built without CUDA"):
        CudaDevice()
    # It may have fallen off the bus: that costs this worker, and not the job.
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(GpuLost, match="the driver does not answer torch"):
        CudaDevice()


def test_which_chips_are_too_old_is_asked_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_120", "sm_75", "sm_90a", "compute_120", "gfx942"])
    assert oldest_capability() == (7, 5)
    monkeypatch.setattr(torch.cuda, "get_arch_list", list)
    assert oldest_capability() == (0, 0)


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """A GPU of this capability, under a torch that serves 7.5 and newer ones."""

    def is_there(major: int, minor: int) -> None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, minor))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A chip")
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90"])
        monkeypatch.setattr(cuda_device, "find_kernels", lambda: "torch")

    return is_there


def test_a_chip_that_is_too_old_is_told_with_both_numbers_and_what_to_do(chip: Callable[[int, int], None]) -> None:
    chip(6, 1)
    with pytest.raises(RunError, match=r"A chip has compute capability 6\.1; 7\.5 is the minimum .* Use `device: cpu`"):
        CudaDevice()
    chip(7, 5)
    assert CudaDevice().precision == "fp32"
    with pytest.raises(RunError, match=r"A chip does not compute in bfloat16\. Use `precision: fp16`"):
        CudaDevice("bf16")
    chip(9, 0)
    assert CudaDevice().precision == "bf16"


def test_of_several_gpus_each_worker_sees_one_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setattr(assembly, "gpus_here", lambda: ("4", "7"))
    monkeypatch.setattr(cuda_device, "CudaDevice", lambda *_, **__: CPU)
    spec, seen = gang.job(Momentum, device="cuda"), []
    for place in range(3):
        assembly.device_for(spec, place)
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
    assert seen == ["4", "7", "4"]


class Runtime:
    """The part of CUDA's runtime that locks pages; `code` is what it answers."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.locked: dict[int, int] = {}
        self.last_errors: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.last_errors[threading.get_ident()] = self.code
        if not self.code:
            self.locked[address] = size
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


def test_pages_are_locked_for_as_long_as_the_memory_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, device = Runtime(), object.__new__(CudaDevice)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    arena = Arena(device.lock_pages)
    first = arena.reserve(5000)
    assert first is not None
    assert runtime.locked == {first.data_ptr(): 5000}
    del first
    child = os.fork()
    if child == 0:  # the memory is not there, and its driver is not to be asked
        del arena
        os._exit(len(runtime.locked))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    larger = arena.reserve(9000)
    assert larger is not None
    assert runtime.locked == {larger.data_ptr(): 9000}
    del larger, arena
    assert not runtime.locked


def test_pages_that_cannot_be_locked_are_told(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    runtime, device = Runtime(code=2), object.__new__(CudaDevice)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    assert Arena(device.lock_pages).reserve(5000) is not None
    assert "cudaHostRegister gave error 2" in caplog.text
    assert 2 in runtime.last_errors.values()
    assert not runtime.last_errors.get(threading.get_ident()), "the next kernel of this thread would raise it"
    assert device.copy_out([(torch.zeros(3), torch.zeros(3))]) is None
