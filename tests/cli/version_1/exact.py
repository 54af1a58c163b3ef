"""A task whose arithmetic is exact in float32, so that its bits are the same on every machine.

The gradient of the loss is the mean of the inputs, and all numbers are small sums of powers of two.
"""

import math
from typing import Any

import torch
from torch.utils.data import TensorDataset

import quorate

NOT_FINITE = 9


class Exact(quorate.Task):
    """Its sample 9 has a loss that is not finite."""

    def model(self) -> torch.nn.Module:
        """A layer with weights of 0.5."""
        model = torch.nn.Linear(4, 1, bias=False)
        torch.nn.init.constant_(model.weight, 0.5)
        return model

    def datasets(self) -> TensorDataset:
        """16 samples."""
        inputs = (torch.arange(64.0).reshape(16, 4) - 20) / 8
        inputs[NOT_FINITE] = math.nan
        return TensorDataset(inputs)

    def order(self, epoch: int, generator: torch.Generator) -> list[int]:
        """Not drawn: what is drawn depends on the version of torch."""
        del generator
        return [(each + epoch) % 16 for each in range(16)]

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """The mean of the outputs."""
        output: torch.Tensor = model(batch[0])
        return output.mean()

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """SGD with powers of two."""
        return torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
