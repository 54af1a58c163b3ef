"""A task of a few parameters that waits in every step until there is a file, where its job names one."""

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
        if self.pause and not Path(self.go).exists():
            time.sleep(self.pause)
        inputs, labels = batch
        return F.cross_entropy(model(inputs), labels)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
