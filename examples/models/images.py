"""Images for the image models: ImageNet in shards where it is there, and synthetic ones where it is not.

Real images lie in two folders of Parquet files, `train` and `validation`, below the folder that `params.data` names,
each listed by `quorate data index`. A row has a column `image` of 3 × side × side bytes and a column `label`. A
relative path counts from the folder of this file.

Without such a folder, images are synthetic: a small pool of random bytes, drawn once from a fixed seed and read over
and over. There is nothing to learn from them, but they cost a GPU the same as real ones.
"""

import logging
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Subset, TensorDataset

import quorate

MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)
POOL = 256

log = logging.getLogger("examples")


class ImageClassification(quorate.Task):
    """What every image model shares: the data, the loss and the accuracy. A model adds model() and optimizer()."""

    data: Path = Path("../../data/imagenet")
    side: int = 224
    classes: int = 1000
    label_smoothing: float = 0.1
    synthetic: int = 1_281_167  # images in an epoch of synthetic ones; ImageNet has as many

    def datasets(self) -> Any:
        folder = (Path(__file__).parent / self.data.expanduser()).resolve()
        if folder.is_dir():
            return quorate.Shards(folder / "train"), quorate.Shards(folder / "validation")
        log.warning("There is no folder %s (params.data): training on synthetic images.", folder)
        training = synthetic_images(self.synthetic, self.side, self.classes, seed=1)
        return training, synthetic_images(1000, self.side, self.classes, seed=2)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        images, labels = images_and_labels(batch)
        return F.cross_entropy(model(normalised(images)), labels, label_smoothing=self.label_smoothing)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        images, labels = images_and_labels(batch)
        scores = model(normalised(images))
        return {"accuracy": (scores.argmax(1) == labels).float().mean(), "loss": F.cross_entropy(scores, labels)}


def images_and_labels(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Shards give a dict by column, tensors in memory a list."""
    images, labels = (batch["image"], batch["label"]) if isinstance(batch, dict) else batch
    return images, labels.long()


def normalised(
    images: torch.Tensor, mean: tuple[float, ...] = MEAN, deviation: tuple[float, ...] = DEVIATION
) -> torch.Tensor:
    """Bytes as numbers around zero. Done on the device: bytes are a quarter of what floats would be to copy there."""
    pixels = images.float() / 255
    # Channel by channel with plain numbers: a tensor of means would have to be copied to the device in every step.
    for channel in range(images.shape[1]):
        pixels[:, channel].sub_(mean[channel]).div_(deviation[channel])
    return pixels


def synthetic_images(samples: int, side: int, classes: int, seed: int) -> Subset[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)
    pool = min(POOL, samples)
    images = torch.randint(0, 256, (pool, 3, side, side), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, classes, (pool,), generator=generator)
    return Subset(TensorDataset(images, labels), (torch.arange(samples) % pool).tolist())
