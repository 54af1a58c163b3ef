"""Handwritten digits as pictures in tar files, in the convention of WebDataset: 000123.png beside 000123.cls.

::

    python scripts/shards.py digits-tar                         # makes the files in data/digits-tar
    quorate data index data/digits-tar/train                    # lists them, once
    quorate data index data/digits-tar/validation
    quorate train examples/digits_tar.yaml

A record is a dict of bytes by ending; `decode` makes a sample of it. What it draws at random depends on the seed, the
epoch and the sample: it is the same on any number of workers.
"""

import io
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import quorate

CLASSES = 10


class DigitsTar(quorate.Task):
    data: Path = Path("../data/digits-tar")  # relative to this file, or absolute
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
        return (
            quorate.Shards(self.data / "train", decode=moved),
            quorate.Shards(self.data / "validation", decode=decoded),
        )

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        pictures, digits = batch
        return F.cross_entropy(model(pictures.unsqueeze(1) / 255), digits)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.learning_rate, momentum=0.9)

    def metrics(self, model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        pictures, digits = batch
        scores = model(pictures.unsqueeze(1) / 255)
        return {"accuracy": (scores.argmax(1) == digits).float().mean(), "loss": F.cross_entropy(scores, digits)}


def decoded(record: dict[str, bytes]) -> tuple[torch.Tensor, int]:
    """The picture of a record, and which digit it is."""
    with Image.open(io.BytesIO(record["png"])) as picture:
        return torch.from_numpy(numpy.array(picture)), int(record["cls"])


def moved(record: dict[str, bytes]) -> tuple[torch.Tensor, int]:
    """The same, moved by up to two pixels."""
    picture, digit = decoded(record)
    right, down = torch.randint(-2, 3, (2,)).tolist()
    return picture.roll((down, right), (0, 1)), digit
