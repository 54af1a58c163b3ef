"""Handwritten digits in Parquet files: columns become batches of tensors, and nothing is held in memory as a whole.

::

    python scripts/shards.py digits-parquet                     # makes the files in data/digits-parquet
    quorate data index data/digits-parquet/train                # lists them, once
    quorate data index data/digits-parquet/validation
    quorate train examples/digits_parquet.yaml

A batch is a dict by column: `picture` has the shape (samples, 28, 28), `digit` is a number each.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import quorate

CLASSES = 10


class DigitsParquet(quorate.Task):
    data: Path = Path("../data/digits-parquet")  # relative to this file, or absolute
    learning_rate: float = 0.1
    width: int = 16

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, self.width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(self.width, 2 * self.width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * self.width * 7 * 7, CLASSES),
        )

    def datasets(self) -> tuple[quorate.Shards, quorate.Shards]:
        return quorate.Shards(self.data / "train"), quorate.Shards(self.data / "validation")

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(pixels(batch)), batch["digit"])

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.learning_rate, momentum=0.9)

    def metrics(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        scores, digits = model(pixels(batch)), batch["digit"]
        return {"accuracy": (scores.argmax(1) == digits).float().mean(), "loss": F.cross_entropy(scores, digits)}


def pixels(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Pictures stay bytes until here: floats would be four times as much to read and to pass on."""
    return batch["picture"].unsqueeze(1) / 255
