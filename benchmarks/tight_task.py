"""A model that needs more memory than there is, played by a CPU."""

import sys
from typing import Any

import torch

from benchmarks.models import MODELS

sys.path.append(str(MODELS))

from resnet import ResNetImageNet

ROOM = 10
"""Samples that fit."""


class TightResNet(ResNetImageNet):
    """ResNet, in which more samples at a time are too many."""

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """The same, if there is room for it."""
        if len(batch[0]) > ROOM:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {len(batch[0])} GiB.")
        return super().loss(model, batch)
