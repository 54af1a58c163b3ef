"""A device that is not the host: sums are formed in its memory or by way of the host's, to the same bits."""

from pathlib import Path
from typing import Any

import pytest
import torch

import gang
from bits import bit_tasks as tasks
from bits.shapes import Shape, trained
from gpu.host_memory import HostMemory
from quorate.collectives.memory import NotShareable
from quorate.core.errors import RunError
from quorate.replica.device import CPU, Device
from quorate.spec.device import kind_of
from quorate.task.task import Task
from quorate.worker import assembly

pytestmark = pytest.mark.usefixtures("unmeasured")


KEYS: dict[str, Any] = {"clip_norm": 0.5, "steps": 7, "accumulate": 2, "evaluate": {"every": 3}, "batch_size": 24}


@pytest.mark.long
@pytest.mark.parametrize("task", [tasks.Momentum, tasks.BatchNormAndDropout], ids=lambda task: task.__name__)
def test_sums_on_a_device_and_by_way_of_the_host_have_the_same_bits(
    task: type[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_place = trained(task, tmp_path / "in place", **KEYS).digest
    monkeypatch.setattr(Device, "is_host", False)
    monkeypatch.setattr(Device, "shareable", HostMemory())
    shapes = Shape(1), Shape(3), Shape(2, links="tcp")
    alone, shared, ring = (trained(task, tmp_path / str(shape), shape, **KEYS) for shape in shapes)

    def refuse(*_: object) -> None:
        raise NotShareable("nothing is shared here")

    monkeypatch.setattr(HostMemory, "create", refuse)
    staged = trained(task, tmp_path / "staged", Shape(2), **KEYS)
    assert {ended.digest for ended in (alone, shared, ring, staged)} == {in_place}
    assert "summed in the memory of the devices: all 3 workers see it" in shared.log
    assert "round a ring" in ring.log
    assert "by way of the host's memory: worker 0: nothing is shared here" in staged.log


def test_a_job_without_a_gpu_computes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quorate.spec.device.gpus_here", tuple)
    spec = gang.job(tasks.Momentum)
    assert kind_of(spec) == "cpu"
    assert assembly.device_for(spec, 0) is CPU


def test_a_gpu_is_found_and_used_where_the_strategy_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quorate.spec.device.gpus_here", lambda: ("0",))
    monkeypatch.setattr("quorate.spec.device.torch_has_cuda", lambda: False)
    assert kind_of(gang.job(tasks.Momentum)) == "cpu"
    monkeypatch.setattr("quorate.spec.device.torch_has_cuda", lambda: True)
    assert kind_of(gang.job(tasks.Momentum)) == "cuda"
    assert kind_of(gang.job(tasks.Momentum, device="cpu")) == "cpu"
    assert kind_of(gang.job(tasks.Momentum, strategy="parameter-server")) == "cuda"
    for strategy in ({"kind": "ring", "compress": {"bits": 8}}, {"kind": "parameter-server", "mode": "asynchronous"}):
        assert kind_of(gang.job(tasks.Momentum, strategy=strategy)) == "cpu"


def test_a_gpu_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "gpus_here", tuple)
    with pytest.raises(RunError, match="asks for a GPU, and this machine has none"):
        assembly.device_for(gang.job(tasks.Momentum, device="cuda"), 0)


def test_on_a_cpu_bf16_is_computed_by_autocast() -> None:
    device = assembly.device_for(gang.job(tasks.Momentum, device="cpu", precision="bf16"), 0)
    assert device.facts(1, True)["precision"] == "bf16"
    with device.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
