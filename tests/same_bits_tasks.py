"""The tasks that `scripts/same_bits.py` trains with two versions of the package."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import quorate

FEATURES, CLASSES = 12, 4


def points(seed: int, samples: int, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Points on several scales, so that the order of additions shows in the last bits."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, FEATURES, generator=generator) * 10 ** torch.linspace(-2, 1, FEATURES)
    return TensorDataset(inputs.to(dtype), (inputs.cumsum(1)[:, ::4].sum(1) > 0).long() + 2 * (inputs[:, 0] > 0).long())


class Small(quorate.Task):
    """Momentum, two layers, a metric."""

    learning_rate: float = 0.05
    dtype = torch.float32

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES)).to(self.dtype)

    def datasets(self) -> Any:
        return points(1, 156, self.dtype), points(2, 40, self.dtype)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, classes = batch
        return F.cross_entropy(model(inputs), classes)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        inputs, classes = batch
        scores = model(inputs)
        return {"accuracy": (scores.argmax(1) == classes).float().mean(), "loss": F.cross_entropy(scores, classes)}

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.learning_rate, momentum=0.9)


class Normed(Small):
    """Batch norm, dropout, AdamW."""

    def model(self) -> nn.Module:
        normed = [nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3)]
        return nn.Sequential(*normed, nn.Linear(16, CLASSES))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate, weight_decay=0.1)


class Exact(Small):
    """In float64: what differs between two orders of addition is below 1e-9."""

    dtype = torch.float64


class Killed(Normed):
    """Once, after a checkpoint, a worker kills itself, or waits until it is killed together with all others."""

    everybody: bool = False

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        marker = Path(__file__).with_name("fault")
        if any(marker.parent.glob("runs/*/checkpoints/step-*")) and not marker.exists():
            marker.touch()
            if not self.everybody:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
        return super().loss(model, batch)


def own_loop(run: Any, learning_rate: float = 0.05) -> None:
    """A training loop of one's own, with an evaluation."""
    task = Normed()
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    model, optimizer = run.prepare(model, optimizer)
    training, validation = task.datasets()
    run.evaluate(validation, lambda batch: task.metrics(model, batch))
    for _ in run.epochs():
        for batch in run.batches(training):
            run.step(task.loss(model, batch))
