"""Parameter servers on a device that is not the host, with its fused optimizers: the digest of the ring there."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gang
from bits import bit_tasks as tasks
from bits import sparse_tasks
from bits.shapes import Shape, one_digest, trained
from bits.test_lagging_bits import Convolutions
from gpu import cuda_norms
from quorate.task.task import Task
from replica.away_device import AwayDevice

pytestmark = pytest.mark.usefixtures("unmeasured")

CASES: list[tuple[type[Task], dict[str, Any]]] = [
    (Convolutions, {"clip_norm": 0.5}),
    (tasks.Adam, {"schedule": {"kind": "cosine", "warmup": 3}, "average": {"decay": 0.9}}),
    (tasks.BatchNormAndDropout, {"batch_size": 21, "clip_norm": 0.1}),
    (tasks.TwoOptimizers, {"clip_norm": 0.3}),
    (tasks.NAdamInFloat64, {"clip_norm": 0.3}),
]


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> AwayDevice:
    made = AwayDevice(channels_last=True)
    monkeypatch.setattr(gang, "CPU", made)
    return made


BATCH: dict[str, Any] = {"batch_size": 24}


@pytest.mark.long
@pytest.mark.parametrize(("task", "keys"), CASES, ids=lambda one: getattr(one, "__name__", ""))
def test_servers_give_the_digest_of_the_ring(task: type[Task], keys: dict[str, Any], tmp_path: Path) -> None:
    one_digest(task, tmp_path, Shape(1), Shape(3, 2, 2), Shape(2, 2, 2, links="tcp"), **BATCH | keys)


class TenClasses(Convolutions):
    """What lies behind the last bias, in the ring's memory, does not begin at a multiple of 16 bytes."""

    def model(self) -> nn.Module:
        seen = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 16, 3), nn.Flatten())
        return nn.Sequential(*seen, nn.Linear(64, 40), nn.Linear(40, 10))


@pytest.mark.long
@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("clip_norm", [0.1, None])
def test_norms_are_added_up_in_the_order_of_the_ring(
    lanes: int, clip_norm: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's order depends on where a gradient lies."""
    monkeypatch.setattr(torch, "_foreach_norm", cuda_norms.foreach_norm)
    keys: dict[str, Any] = {"lanes": lanes, "clip_norm": clip_norm, "steps": 12, **BATCH}
    ring = trained(TenClasses, tmp_path / "ring", **keys)
    for shape in (Shape(1, 1), Shape(min(2, lanes), 2, 2)):
        served = trained(TenClasses, tmp_path / str(shape), shape, **keys)
        assert (served.digest, served.norms) == (ring.digest, ring.norms)


def test_a_job_goes_on_with_servers_and_with_the_ring(tmp_path: Path) -> None:
    whole = trained(Convolutions, tmp_path / "whole", Shape(2, 1), **BATCH).digest
    folder = tmp_path / "changing"
    for shape, stop_at in ((Shape(2, 2, 2), 2), (Shape(3), 4)):
        assert trained(Convolutions, folder, shape, stop_at=stop_at, **BATCH).ending == "interrupted"
    assert trained(Convolutions, folder, Shape(1, 2, 2), **BATCH).digest == whole


class UsedLate(tasks.SometimesUsed):
    """No lane has a target that large before the second step."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        assert isinstance(model, nn.ModuleDict)
        part = "rarely" if targets.max() > 1.9 else "always"
        return F.mse_loss(model[part](inputs).squeeze(-1), targets)

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=1e-8, momentum=0.9)


@pytest.mark.long
def test_all_servers_go_on_without_fused_kernels_where_one_block_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a server for each block none sees by itself that others have a momentum already."""
    sgd = importlib.import_module("torch.optim.sgd")
    fused = sgd._fused_sgd

    def rounded_otherwise(parameters: list[torch.Tensor], *given: Any, **settings: Any) -> None:
        fused(parameters, *given, **settings)
        for parameter in parameters:
            parameter.mul_(1 + 1e-6)

    monkeypatch.setattr(sgd, "_fused_sgd", rounded_otherwise)
    keys: dict[str, Any] = {"steps": 12, "batch_size": 8, "clip_norm": 0.5}
    ring = one_digest(UsedLate, tmp_path, Shape(2), Shape(2, 5), **keys)
    folder = tmp_path / "changing"
    assert trained(UsedLate, folder, Shape(1, 4), stop_at=1, **keys).ending == "interrupted"
    assert trained(UsedLate, folder, Shape(3, 5), **keys).digest == ring


@pytest.mark.long
@pytest.mark.parametrize("task", [sparse_tasks.Embeddings, sparse_tasks.TwoKinds], ids=lambda task: task.__name__)
def test_sparse_gradients_have_the_same_bits_on_any_number(task: type[Task], tmp_path: Path) -> None:
    one_digest(task, tmp_path, Shape(1, 1), Shape(3, 2, 2), clip_norm=0.5, **BATCH)
