"""What every device does alike, what pinning fixes on a CPU, and how often a step reads from its device."""

import contextlib
import os
import random
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gang
from bits import bit_tasks as tasks
from quorate.replica import device as device_module
from quorate.replica.device import CPU, Device, canary, digests, same_bits
from quorate.strategies.ring import RingStrategy
from quorate.task.task import Task
from replica.counting_device import CountingDevice, ReadsPast

DEVICES: list[Device] = [CPU, CountingDevice()]


@pytest.fixture(params=DEVICES, ids=lambda device: device.name)
def device(request: pytest.FixtureRequest) -> Device:
    made: Device = request.param
    return made


def test_a_model_and_a_batch_are_placed_and_keep_their_values(device: Device) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    before = digests(model.state_dict().items())
    placed = device.place(model)
    assert placed is model, "parameters are replaced in place, so that ties stay"
    assert digests(placed.state_dict().items(), device) == before
    moved = device.move({"inputs": (torch.ones(4, 3), [torch.zeros(2)]), "label": 3, "names": ["a"]})
    assert (moved["label"], moved["names"]) == (3, ["a"])
    assert device.numbers([placed(moved["inputs"][0]).isfinite().all(), moved["inputs"][1][0].sum()])() == [1.0, 0.0]


def test_numbers_of_any_kind_are_read_in_order(device: Device) -> None:
    scalars = [torch.tensor(0.1), torch.tensor([7]), torch.tensor(True), torch.tensor(0.1, dtype=torch.float64)]
    read = device.numbers(scalars)
    assert read() == [float(numpy.float32(0.1)), 7.0, 1.0, 0.1] == read()
    assert device.numbers([])() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_flat_and_of_its_type(device: Device, dtype: torch.dtype) -> None:
    memory = device.zeros(6, dtype)
    assert (memory.shape, memory.dtype) == ((6,), dtype)
    assert not any(device.content(memory))
    assert device.content(memory.fill_(1.0), slice(0, dtype.itemsize)) == CPU.content(torch.ones(1, dtype=dtype))


def test_a_seed_begins_the_same_stream_in_every_generator(device: Device) -> None:
    def draws() -> tuple[float, float, float]:
        (drawn,) = device.numbers([torch.rand(())])()
        return drawn, float(numpy.random.random()), random.random()

    device.seed(2**62 + 5)
    first = draws()
    assert draws() != first
    device.seed(2**62 + 5)
    assert draws() == first


def test_bits_not_values_are_compared(device: Device) -> None:
    zero, nan = torch.tensor([0.0]), torch.tensor([torch.nan])
    assert torch.equal(zero, -zero) and not torch.equal(nan, nan)
    pairs = [
        (zero, -zero),
        (nan, nan.clone()),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2), torch.zeros(1, 2)),
        (torch.zeros(0), torch.zeros(0)),
        (torch.tensor(3), torch.tensor(3)),
    ]
    assert device.same_bits(pairs) == [False, True, False, False, True, True]
    assert [same_bits(left, right) for left, right in pairs] == device.same_bits(pairs)


@given(st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]))
def test_every_type_has_its_bytes(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).to(dtype).reshape(2, 3)
    for device in DEVICES:
        assert device.content(tensor).nbytes == 6 * dtype.itemsize
        assert device.content(tensor, slice(1, 3)) == device.content(tensor)[1:3]
        assert device.host_view(tensor) in (None, device.content(tensor))
        assert digests([("x", tensor)], device) == digests([("x", tensor.clone())])


def test_strides_do_not_count_and_shapes_do(device: Device) -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    across = tensor.t().contiguous().t()
    assert not across.is_contiguous()
    assert device.host_view(across) is None
    assert digests([("x", across)], device) == digests([("x", tensor)])
    assert digests([("x", tensor.reshape(3, 2))], device) != digests([("x", tensor)])


def test_a_parameter_is_read_without_its_graph(device: Device) -> None:
    assert bytes(device.content(torch.nn.Parameter(torch.ones(1)))) == b"\0\0\x80?"


def test_facts_name_the_device(device: Device) -> None:
    assert device.facts(1, True)["device"] == device.name
    with device.autocast():
        device.synchronize()


class Normed(tasks.Regression):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(tasks.FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def counted(task: type[Task], folder: Path, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> tuple[str, dict[str, int]]:
    """The digest of a job on the counting device, and what it brings to the host; none of it past the device."""
    device = CountingDevice()
    monkeypatch.setattr(gang, "CPU", device)
    monkeypatch.setattr(RingStrategy, "may_lag", False)  # what is read late is read together

    def refuse_reads_past_it(_: int, loop: Any) -> None:
        run = loop.run

        def guarded() -> str:
            with ReadsPast(device):
                ending: str = run()
            return ending

        loop.run = guarded

    folder.mkdir()
    keys = {"evaluate": {"every": 1_000}, "checkpoint": {"every": 1_000}} | keys
    ended = gang.train(task, gang.job(task, **keys), 1, folder, sabotage=refuse_reads_past_it)
    return ended.digest, device.counts


@pytest.mark.parametrize(
    ("task", "keys", "expected"),
    [
        # The losses of all lanes, and the norm of the gradient. A batch is moved ahead, and its lane finds it moved.
        (tasks.Regression, {"lanes": 1}, {"numbers": 2, "content": 0, "same_bits": 0, "move": 2}),
        # Micro-batches are moved one by one; their losses are read at once.
        (tasks.Regression, {"lanes": 1, "accumulate": 3}, {"numbers": 2, "content": 0, "same_bits": 0, "move": 6}),
        (tasks.Regression, {"lanes": 1, "clip_norm": 1.0}, {"numbers": 2, "content": 0, "same_bits": 0, "move": 2}),
        (tasks.Regression, {"lanes": 4}, {"numbers": 2, "content": 0, "same_bits": 0, "move": 8}),
        # Buffers: what all lanes have changed.
        (Normed, {"lanes": 1}, {"numbers": 2, "content": 0, "same_bits": 1, "move": 2}),
    ],
)
def test_a_step_reads_from_its_device_so_often(
    task: type[Task], keys: dict[str, Any], expected: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, few = counted(task, tmp_path / "few", monkeypatch, steps=3, **keys)
    digest, many = counted(task, tmp_path / "many", monkeypatch, steps=7, **keys)
    assert {kind: (many[kind] - few[kind]) / 4 for kind in many} == expected
    monkeypatch.setattr(gang, "CPU", CPU)
    (tmp_path / "cpu").mkdir()
    assert gang.train(task, gang.job(task, steps=7, **keys), 1, tmp_path / "cpu").digest == digest


def told_by_child(act: Callable[[], str]) -> str:
    """What a forked process says: pinning must not leak into the other tests."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.write(write, act().encode())
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read) as told:
        return told.read()


def test_the_canary_is_the_same_each_time_and_in_each_process(device: Device) -> None:
    songs = {canary(device), canary(device), told_by_child(lambda: canary(device)), canary(CPU)}
    assert len(songs) == 1
    assert "" not in songs


def test_the_canary_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    canary(CPU)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("kernel", ["conv2d", "layer_norm"])
def test_a_kernel_that_rounds_otherwise_changes_the_canary(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, original = canary(CPU), getattr(device_module, kernel)

    def rounded_otherwise(*args: Any, **keys: Any) -> torch.Tensor:
        result: torch.Tensor = original(*args, **keys)
        return result * (1 + 2**-23)

    monkeypatch.setattr(device_module, kernel, rounded_otherwise)
    assert canary(CPU) != usual


def test_flushing_denormals_changes_the_canary() -> None:
    def flushed() -> str:
        return canary(CPU) if torch.set_flush_denormal(True) else "not supported by this processor"

    assert told_by_child(flushed) not in ("", canary(CPU))


def test_pinning_fixes_threads_denormals_and_kernels() -> None:
    def pinned() -> str:
        torch.set_flush_denormal(True)
        CPU.pin(2, deterministic=True)
        kept = float(torch.tensor(1e-38) * 0.01) != 0.0
        fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        return f"{torch.get_num_threads()} {torch.are_deterministic_algorithms_enabled()} {kept} {fill}"

    assert told_by_child(pinned) == "2 True True False"


def test_a_job_may_do_without_deterministic_kernels() -> None:
    def pinned() -> str:
        CPU.pin(1, deterministic=True)
        CPU.pin(1, deterministic=False)
        return f"{torch.get_num_threads()} {torch.are_deterministic_algorithms_enabled()}"

    assert told_by_child(pinned) == "1 False"


def test_facts_name_what_the_bits_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = CPU.facts(3, True)
    assert facts["threads"] == "3"
    assert facts["deterministic"] == "True"
    assert facts["torch"] == torch.__version__
    assert all(isinstance(value, str) and value for value in facts.values())
    assert CPU.facts(4, True) != facts
    monkeypatch.setattr(device_module, "version", _absent)
    assert CPU.facts(3, True)["quorate"] == "unknown"


def _absent(package: str) -> str:
    raise PackageNotFoundError(package)
