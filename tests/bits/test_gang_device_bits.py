"""A gang on a device that is not the host, as on a GPU: the bits that it has on the host."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bits import bit_tasks as tasks
from bits import test_fsdp_bits as fsdp
from bits.shapes import Shape, trained
from quorate.cuda.device import CudaDevice
from quorate.replica.device import Device

pytestmark = pytest.mark.usefixtures("unmeasured")

TENSOR = {"shard": 2, "tensor": 2}
KEYS: dict[str, Any] = {"steps": 5, "clip_norm": 0.5, "accumulate": 2, "batch_size": 24, "evaluate": {"every": 3}}


class Fused(fsdp.Exact):
    """In float64, by an optimizer for which torch has a kernel of its own where tensors are spread."""

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate)


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Optimizers are those of a GPU from now on: fused where torch has such a kernel, else for all parameters at once.
    Call it, and the device is not the host."""
    monkeypatch.setattr(Device, "tune", CudaDevice.tune)
    kernels = sys.modules["torch.optim.optimizer"]  # torch.optim has no attribute of this name
    monkeypatch.setattr(kernels, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
    return lambda: monkeypatch.setattr(Device, "is_host", False)


@pytest.mark.long
@pytest.mark.parametrize(
    ("task", "mesh", "keys"),
    [
        (Fused, {"shard": 1}, {"memory": {"checkpoint_activations": True}}),
        (fsdp.Exact, {"shard": 2, "offload": True}, {"average": {"decay": 0.9}}),
        pytest.param(fsdp.Exact, TENSOR, {"schedule": {"kind": "cosine", "warmup": 2}}, marks=pytest.mark.long),
        pytest.param(Fused, TENSOR, {}, marks=pytest.mark.long),
        pytest.param(Fused, {"replicate": 2, "shard": 2}, {"precision": "bf16"}, marks=pytest.mark.long),
    ],
    ids=["alone", "offload", "tensor", "tensor fused", "replicate"],
)
def test_shards_away_from_the_host(
    task: type[fsdp.Exact], mesh: dict[str, Any], keys: dict[str, Any], tmp_path: Path, away: Callable[[], None]
) -> None:
    here = fsdp.train(task, mesh, tmp_path / "here", **KEYS | keys)
    away()
    there = fsdp.train(task, mesh, tmp_path / "there", **KEYS | keys)
    assert there.digest == here.digest
    assert there.losses == here.losses
    assert there.progress == here.progress


@pytest.mark.parametrize(
    ("workers", "strategy"),
    [
        (1, {"kind": "ddp"}),
        (2, {"kind": "ddp", "sync_batch_norm": True}),
    ],
    ids=["alone", "sync_batch_norm"],
)
def test_replicas_away_from_the_host(
    workers: int, strategy: dict[str, Any], tmp_path: Path, away: Callable[[], None]
) -> None:
    keys = KEYS | {"strategy": strategy, "workers": workers, "min_workers": workers}
    here = trained(tasks.BatchNormAndDropout, tmp_path / "here", Shape(workers), **keys)
    away()
    there = trained(tasks.BatchNormAndDropout, tmp_path / "there", Shape(workers), **keys)
    assert there.digest == here.digest
    assert there.losses == here.losses
    assert there.progress == here.progress
