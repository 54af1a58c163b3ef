"""Residual networks (He et al., 2015): ResNet-18, -34, -50, -101 and -152, for ImageNet and for CIFAR-10.

::

    quorate train examples/models/resnet50.yaml           # 224×224; synthetic images where ImageNet is not there

    python scripts/datasets.py cifar-10                   # 139 MB, into data/
    quorate train examples/models/cifar_resnet18.yaml

As in most later work, a bottleneck halves the image in its 3×3 convolution instead of its first one ("v1.5"), and the
last batch norm of every block begins at zero, so that each block begins as the identity (Goyal et al., 2017).
"""

from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

import quorate
from cifar import CLASSES, DEVIATION, MEAN, SIDE, TRAINING, VALIDATION, cropped_and_flipped, load
from images import ImageClassification, log, normalised, synthetic_images

Depth = Literal[18, 34, 50, 101, 152]


class ResNetImageNet(ImageClassification):
    depth: Depth = 50
    width: int = 64
    learning_rate: float = 0.1
    weight_decay: float = 1e-4

    def model(self) -> nn.Module:
        return ResNet(self.depth, self.classes, self.width)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            model.parameters(), lr=self.learning_rate, momentum=0.9, nesterov=True, weight_decay=self.weight_decay
        )


class ResNetCifar(quorate.Task):
    data: Path = Path("../../data/cifar-10")
    depth: Depth = 18
    width: int = 64
    learning_rate: float = 0.2
    weight_decay: float = 5e-4
    label_smoothing: float = 0.1

    def model(self) -> nn.Module:
        return ResNet(self.depth, CLASSES, self.width, small_images=True)

    def datasets(self) -> Any:
        folder = (Path(__file__).parent / self.data.expanduser()).resolve()
        if folder.is_dir():
            return load(folder, TRAINING), load(folder, VALIDATION)
        log.warning("There is no folder %s (params.data): training on synthetic images.", folder)
        return synthetic_images(50_000, SIDE, CLASSES, seed=1), synthetic_images(1000, SIDE, CLASSES, seed=2)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        scores = model(normalised(cropped_and_flipped(images), MEAN, DEVIATION))
        return F.cross_entropy(scores, labels, label_smoothing=self.label_smoothing)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            model.parameters(), lr=self.learning_rate, momentum=0.9, nesterov=True, weight_decay=self.weight_decay
        )

    def metrics(self, model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        images, labels = batch
        scores = model(normalised(images, MEAN, DEVIATION))
        return {"accuracy": (scores.argmax(1) == labels).float().mean(), "loss": F.cross_entropy(scores, labels)}


class ResNet(nn.Module):
    """A stem, four stages of residual blocks, and a linear classifier of the mean over the image.

    The usual stem leaves a quarter of each side. With `small_images`, as CIFAR-10's, it is a 3×3 convolution that
    leaves the size as it is.
    """

    def __init__(self, depth: int, classes: int, width: int = 64, *, small_images: bool = False) -> None:
        super().__init__()
        self.stem = (
            nn.Sequential(*convolution(3, width, 3), nn.ReLU(inplace=True))
            if small_images
            else nn.Sequential(*convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        )
        block, counts = STAGES[depth]
        blocks: list[nn.Module] = []
        inputs = width
        for stage, count in enumerate(counts):
            for position in range(count):
                stride = 2 if stage > 0 and position == 0 else 1
                blocks.append(block(inputs, width * 2**stage, stride))
                inputs = width * 2**stage * block.expansion
        self.blocks = nn.Sequential(*blocks)
        self.classify = nn.Linear(inputs, classes)
        nn.init.normal_(self.classify.weight, std=0.01)
        nn.init.zeros_(self.classify.bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.classify(self.blocks(self.stem(images)).mean((2, 3)))
        return scores


class Basic(nn.Module):
    """Two 3×3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            *convolution(inputs, width, 3, stride),
            nn.ReLU(inplace=True),
            *convolution(width, width, 3, is_last=True),
        )
        self.shortcut = shortcut(inputs, width, stride)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.relu(self.branch(images) + self.shortcut(images), inplace=True)


class Bottleneck(nn.Module):
    """A 3×3 convolution between two 1×1 ones, which spare it three quarters of the channels, beside a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.branch = nn.Sequential(
            *convolution(inputs, width, 1),
            nn.ReLU(inplace=True),
            *convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *convolution(width, outputs, 1, is_last=True),
        )
        self.shortcut = shortcut(inputs, outputs, stride)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.relu(self.branch(images) + self.shortcut(images), inplace=True)


STAGES: dict[int, tuple[type[Basic] | type[Bottleneck], tuple[int, ...]]] = {
    18: (Basic, (2, 2, 2, 2)),
    34: (Basic, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
    152: (Bottleneck, (3, 8, 36, 3)),
}
"""How many blocks of which kind the four stages have, by depth."""


def convolution(
    inputs: int, outputs: int, kernel: int, stride: int = 1, *, is_last: bool = False
) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    """A convolution and its batch norm; the last one of a block begins at zero."""
    convolve = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(convolve.weight, mode="fan_out", nonlinearity="relu")
    normalise = nn.BatchNorm2d(outputs)
    if is_last:
        nn.init.zeros_(normalise.weight)
    return convolve, normalise


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    """The input itself, or a projection of it where the block changes its shape."""
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(*convolution(inputs, outputs, 1, stride))
