"""A device that is not the host, with fused optimizers: the same bits however many workers there are."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gang
import quorate
from bits import bit_tasks as tasks
from bits.shapes import Shape, trained
from quorate.task.task import Task
from replica.away_device import AwayDevice

pytestmark = pytest.mark.usefixtures("unmeasured")


class Images:
    def __init__(self) -> None:
        self.images = torch.randn(50, 3, 6, 6, generator=torch.Generator().manual_seed(4))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], index % 4


class Convolutions(quorate.Task):
    """Fused optimizers want gradients that lie as the parameters do: channels last."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 4, 3), nn.Flatten(), nn.Linear(16, 4)
        )

    def datasets(self) -> Any:
        return Images(), Images()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(task: type[Task], workers: int, folder: Path, **keys: Any) -> gang.Ended:
    usual: dict[str, Any] = {"steps": 7, "evaluate": {"every": 3}, "batch_size": 24, "clip_norm": 0.5}
    return trained(task, folder, Shape(workers), **usual | keys)


@pytest.mark.parametrize("lanes", [pytest.param(1, marks=pytest.mark.long), 4])
def test_gradients_lie_as_channels_last_parameters_do(
    lanes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gang, "CPU", AwayDevice(channels_last=True))
    digests = {train(Convolutions, n, tmp_path / f"{n}", lanes=lanes).digest for n in {1, min(lanes, 2)}}
    train(Convolutions, 1, tmp_path / "resumed", lanes=lanes, stop_at=4)
    digests.add(train(Convolutions, 1, tmp_path / "resumed", lanes=lanes).digest)
    assert len(digests) == 1
    # To the last digits what is computed without: fused kernels take whatever lies in memory for the gradient.
    monkeypatch.setattr(gang, "CPU", AwayDevice(fuses=False))
    plain = train(Convolutions, 1, tmp_path / "plain", lanes=lanes)
    monkeypatch.setattr(gang, "CPU", AwayDevice(channels_last=True))
    fused = train(Convolutions, 1, tmp_path / "fused", lanes=lanes)
    assert fused.losses == pytest.approx(plain.losses, rel=1e-3)


class SometimesUsedWithMomentum(tasks.SometimesUsed):
    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=1e-8, momentum=0.9)


@pytest.mark.long
@pytest.mark.parametrize("task", [tasks.SometimesUsed, SometimesUsedWithMomentum], ids=lambda task: task.__name__)
def test_a_parameter_that_gets_its_first_gradient_late(
    task: type[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gang, "CPU", AwayDevice())
    digests = {train(task, n, tmp_path / f"{n}", steps=12, batch_size=8).digest for n in (1, 2)}
    train(task, 1, tmp_path / "resumed", steps=12, batch_size=8, stop_at=5)
    digests.add(train(task, 2, tmp_path / "resumed", steps=12, batch_size=8).digest)
    assert len(digests) == 1


TASKS = [tasks.BatchNormAndDropout, tasks.TwoOptimizers, tasks.NoisyOptimizer, Convolutions]
ALIKE = [
    tasks.Adam,
    tasks.TinyTransformer,
    tasks.SharedBuffer,
    tasks.Regression,
    tasks.Momentum,
    tasks.ConstantBuffers,
    tasks.LaneZeroBuffer,
    tasks.MultiStep,
]
"""Tasks that ask of a device what one of the others asks too."""


@pytest.mark.long
@pytest.mark.parametrize(
    "task", [*TASKS, *(pytest.param(task, marks=pytest.mark.long) for task in ALIKE)], ids=lambda task: task.__name__
)
def test_steps_that_are_read_late_have_the_bits_of_those_that_are_read_at_once(
    task: type[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is alone lags, two do not; and one that is resumed in the middle does from its second step on."""
    monkeypatch.setattr(gang, "CPU", AwayDevice())
    keys: dict[str, Any] = {"steps": 14, "evaluate": {"every": 10}, "accumulate": 2}
    if task is not tasks.MultiStep:
        keys["schedule"] = {"kind": "cosine", "warmup": 3}
    lone = train(task, 1, tmp_path / "1", **keys)
    two = train(task, 2, tmp_path / "2", **keys)
    assert lone.digest == two.digest
    assert lone.losses == two.losses
    assert lone.progress == two.progress
    train(task, 1, tmp_path / "resumed", **keys, stop_at=6)
    assert train(task, 1, tmp_path / "resumed", **keys).digest == lone.digest
