"""A task without a mistake, from which the mistaken ones are made."""

from typing import Any

import torch
from torch import nn

import quorate


class Sound(quorate.Task):
    learning_rate: float = 0.1

    def model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def datasets(self) -> Any:
        inputs = torch.arange(96.0).reshape(32, 3) / 96
        samples = list(zip(inputs, inputs.sum(1, keepdim=True), strict=True))
        return samples[:24], samples[24:]

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        return nn.functional.mse_loss(model(inputs), targets)

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=self.learning_rate)
