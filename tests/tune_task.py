"""A task of a few parameters whose quality depends on its params, and that takes as long as its job says."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import quorate


class Small(quorate.Task):
    learning_rate: float = 0.1
    width: int = 8
    pause: float = 0.0
    go: str = ""
    """A file: while it is there, nobody pauses."""
    fails: bool = False
    kill: str = ""
    """A file: the worker that finds none kills itself, and leaves it."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, self.width), nn.Tanh(), nn.Linear(self.width, 4))

    def datasets(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        inputs = torch.randn(300, 8, generator=generator)
        labels = (inputs @ torch.randn(8, 4, generator=generator)).argmax(1)
        rows = [(inputs[number], int(labels[number])) for number in range(300)]
        return rows[:240], rows[240:]

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        over = time.monotonic() + self.pause
        while time.monotonic() < over and not Path(self.go or "/nowhere").exists():
            time.sleep(0.01)
        if self.fails:
            raise ValueError("this trial cannot be trained")
        if self.kill and not Path(self.kill).exists():
            Path(self.kill).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        inputs, labels = batch
        return F.cross_entropy(model(inputs), labels)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.learning_rate, momentum=0.9)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        inputs, labels = batch
        scores = model(inputs)
        return {"accuracy": (scores.argmax(1) == labels).float().mean(), "loss": F.cross_entropy(scores, labels)}
