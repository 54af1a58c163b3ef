"""A device whose memory the others do not see: sums go by way of the host, to the same bits."""

from pathlib import Path

import pytest
import torch

import gang
from bits import bit_tasks as tasks
from quorate.core.errors import RunError
from quorate.spec.device import kind_of
from quorate.training import devices
from quorate.training.device import CPU, CpuDevice
from quorate.training.task import Task

pytestmark = pytest.mark.usefixtures("unmeasured")


def digest(task: type[Task], workers: int, folder: Path, links: str = "auto") -> str:
    folder.mkdir()
    spec = gang.job(task, clip_norm=0.5, links=links, steps=7, accumulate=2, evaluate={"every": 3}, batch_size=24)
    return gang.train(task, spec, workers, folder).digest


@pytest.mark.parametrize("task", [tasks.Momentum, tasks.BatchNormAndDropout], ids=lambda task: task.__name__)
def test_sums_by_way_of_the_host_have_the_same_bits(
    task: type[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_place = digest(task, 1, tmp_path / "in place")
    monkeypatch.setattr(CpuDevice, "is_host", False)
    staged = {
        digest(task, workers, tmp_path / f"{workers} {links}", links)
        for workers, links in ((1, "auto"), (2, "auto"), (3, "tcp"))
    }
    assert staged == {in_place}


def test_a_job_without_a_gpu_computes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quorate.spec.device.gpus_here", tuple)
    spec = gang.job(tasks.Momentum)
    assert kind_of(spec) == "cpu"
    assert devices.device_for(spec, 0) is CPU


def test_a_gpu_is_found_and_used_by_the_plain_ring_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quorate.spec.device.gpus_here", lambda: ("0",))
    assert kind_of(gang.job(tasks.Momentum)) == "cuda"
    assert kind_of(gang.job(tasks.Momentum, device="cpu")) == "cpu"
    assert kind_of(gang.job(tasks.Momentum, strategy="parameter-server")) == "cpu"
    assert kind_of(gang.job(tasks.Momentum, strategy={"kind": "ring", "compress": {"bits": 8}})) == "cpu"


def test_a_gpu_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpus_here", tuple)
    with pytest.raises(RunError, match="asks for a GPU, and this machine has none"):
        devices.device_for(gang.job(tasks.Momentum, device="cuda"), 0)


def test_on_a_cpu_bf16_is_computed_by_autocast() -> None:
    device = devices.device_for(gang.job(tasks.Momentum, device="cpu", precision="bf16"), 0)
    assert device.facts(1, True)["precision"] == "bf16"
    with device.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
