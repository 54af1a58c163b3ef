"""A task of a few parameters that takes its time, as long as there is no file that its job names."""

import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import quorate


class Small(quorate.Task):
    pause: float = 0.0
    go: str = ""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def datasets(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        return [(torch.randn(8, generator=generator), number % 4) for number in range(240)], None

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        over = time.monotonic() + self.pause
        while time.monotonic() < over and not Path(self.go).exists():
            time.sleep(0.02)
        inputs, labels = batch
        return F.cross_entropy(model(inputs), labels)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
