"""What a worker uses of its device's memory: who asks takes nothing from others, and a shortage is told once."""

from pathlib import Path
from typing import Any

import pytest
import torch

import gang
from bits.bit_tasks import Momentum
from quorate.cuda.device import CudaDevice
from quorate.observe.event import DeviceMemoryUse
from quorate.observe.screen import summary_rows
from quorate.replica.device import CPU
from quorate.training.memory_watch import MemoryWatch
from replica.away_device import AwayDevice
from training.recorded import run

GIB = 2**30


class Filling(AwayDevice):
    """Its memory was used so much, each time that somebody asks."""

    def __init__(self, *reserved: float, total: float = 100.0) -> None:
        super().__init__()
        self._reserved = list(reserved)
        self._total = total

    def memory_use(self) -> DeviceMemoryUse:
        now = self._reserved.pop(0) if len(self._reserved) > 1 else self._reserved[0]
        return DeviceMemoryUse(int(now / 2 * GIB), int(now * GIB), int(self._total * GIB))


def test_the_most_of_all_and_the_most_since_it_was_taken() -> None:
    watch = MemoryWatch(gang.job(Momentum), Filling(90, 3, 7, 5, 2, 2))
    assert watch.take() == DeviceMemoryUse(3 * GIB // 2, 3 * GIB, 100 * GIB), "building is no part of it"
    assert watch.look() == DeviceMemoryUse(7 * GIB // 2, 7 * GIB, 100 * GIB)
    assert watch.take() == DeviceMemoryUse(7 * GIB // 2, 7 * GIB, 100 * GIB), "what another has looked at counts"
    assert watch.take() == DeviceMemoryUse(GIB, 2 * GIB, 100 * GIB)
    assert watch.look() == DeviceMemoryUse(7 * GIB // 2, 7 * GIB, 100 * GIB)


def test_the_host_tells_nothing_of_its_memory() -> None:
    watch = MemoryWatch(gang.job(Momentum), CPU)
    assert watch.look() is None
    assert watch.take() is None
    assert watch.notes() == []


def test_memory_that_is_nearly_full_is_told_once_with_what_helps() -> None:
    watch = MemoryWatch(gang.job(Momentum), Filling(1, 94, 96.2, 97, total=100))
    assert watch.notes() == [], "there is room, whichever step of the job this is"
    assert watch.notes() == [
        "the memory of the GPU is nearly full: 96.2 of 100.0 GiB. If it runs out, the job ends; `on_out_of_memory: "
        "shrink` continues with smaller micro-batches, `memory: {checkpoint_activations: true}` needs less."
    ]
    assert watch.notes() == watch.notes() == []


def test_it_looks_more_and_more_seldom_counted_from_where_this_process_has_begun() -> None:
    device = Filling(1)
    watch, looks = MemoryWatch(gang.job(Momentum), device), []
    device.memory_use = lambda: looks.append(watch._steps) or DeviceMemoryUse(0, 0, 1)  # type: ignore[func-returns-value,method-assign]
    assert [watch.notes() for _ in range(9)] == [[]] * 9
    assert looks == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"on_out_of_memory": "shrink"}, []),
        ({"memory": {"checkpoint_activations": True}}, ["`on_out_of_memory: shrink`"]),
        ({"strategy": "parameter-server"}, ["`memory: {checkpoint_activations: true}`"]),
    ],
)
def test_no_advice_is_given_that_was_taken_already(keys: dict[str, Any], told: list[str]) -> None:
    notes = MemoryWatch(gang.job(Momentum, **keys), Filling(99)).notes()
    named = [
        key for key in ("`on_out_of_memory: shrink`", "`memory: {checkpoint_activations: true}`") if key in str(notes)
    ]
    assert named == told


@pytest.mark.usefixtures("unmeasured")
def test_a_job_tells_it_with_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang, "CPU", Filling(50, 50, 50, 98))
    told = run(Momentum, tmp_path, steps=12).fields("step", "warnings")
    (step,) = (step for step, warnings in told.items() if "nearly full" in str(warnings))
    assert step is not None and step <= 4, "by the step that is complete by then"


def test_a_gpu_is_asked_for_what_its_allocator_has_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"max_memory_allocated": 5, "max_memory_reserved": 7}
    for name in kept:
        monkeypatch.setattr(torch.cuda, name, lambda _, name=name: kept[name])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: kept.update(dict.fromkeys(kept, 1)))
    properties = type("Properties", (), {"total_memory": 9})()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    device = CudaDevice.__new__(CudaDevice)
    device._device = torch.device("cuda", 0)
    assert device.memory_use() == DeviceMemoryUse(5, 7, 9)
    assert device.memory_use() == DeviceMemoryUse(1, 1, 9)


def test_the_summary_says_how_much_was_used() -> None:
    used = {"allocated_bytes": int(41.2 * GIB), "reserved_bytes": int(45 * GIB), "total_bytes": int(139.8 * GIB)}
    told = "41.2 of 139.8 GiB on the GPU, 45.0 with what PyTorch keeps for later"
    assert ("memory", told) in summary_rows({"device_memory": used})
