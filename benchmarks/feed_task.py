"""A task that does next to nothing with what it reads from shards, or computes for a while with each lane."""

from typing import Any

import torch
from torch import nn, optim
from torch.utils.data import TensorDataset

from benchmarks.synthetic_shards import BATCH, FEATURES, SIDE, decoded
from quorate.shards.dataset import Shards
from quorate.task.task import Task

WIDTH = 256


class FeedTask(Task):
    """Reads shards of a kind from a place, or a few samples in memory where none is given.

    `work` is how many products of matrices a lane computes, beside its step.
    """

    kind: str
    place: str
    work: int = 0

    def model(self) -> nn.Module:
        """One number in, one number out."""
        return nn.Linear(1, 1)

    def datasets(self) -> Any:
        """A training set only."""
        if not self.place:
            return self._in_memory()
        return Shards(self.place, decode=decoded if self.kind == "tar" else None)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Of the first number of each sample."""
        inputs = batch["features"][:, :1] if isinstance(batch, dict) else batch[0].flatten(1)[:, :1].float()
        worked = work(self.work) if self.work else 0.0
        loss: torch.Tensor = model(inputs).square().mean() + 0.0 * worked
        return loss

    def optimizer(self, model: nn.Module) -> optim.Optimizer:
        """Plain."""
        return optim.SGD(model.parameters(), lr=1e-9)

    def _in_memory(self) -> TensorDataset:
        shape, dtype = ((SIDE, SIDE, 3), torch.uint8) if self.kind == "tar" else ((FEATURES,), torch.float32)
        count = BATCH[self.kind]
        return TensorDataset(torch.zeros(count, *shape, dtype=dtype), torch.zeros(count, dtype=torch.int64))


def work(times: int) -> float:
    """Compute so many products of matrices; a number that depends on all of them."""
    matrix = torch.full((WIDTH, WIDTH), 1 / WIDTH)
    product = matrix
    for _ in range(times):
        product = product @ matrix
    return float(product[0, 0])
