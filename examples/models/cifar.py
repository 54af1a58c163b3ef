"""CIFAR-10: 60,000 images of 32×32 pixels in ten classes, and the crops and flips that make more of them.

::

    python scripts/datasets.py cifar-10               # fetches the data into data/cifar-10

The data is in the "binary version" of its authors: five files `data_batch_N.bin` and `test_batch.bin`, in which every
image is a byte for its class and 3,072 for its pixels, first all red ones. Their own `cifar-10-batches-bin` will do.
"""

from pathlib import Path

import numpy
import torch
from torch.utils.data import TensorDataset

import quorate

CLASSES = 10
SIDE = 32
BYTES = 1 + 3 * SIDE * SIDE
TRAINING = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
VALIDATION = ("test_batch.bin",)
MEAN = (0.4914, 0.4822, 0.4465)
DEVIATION = (0.2470, 0.2435, 0.2616)
HOW_TO_GET_IT = """To fetch it into data/cifar-10:
  python scripts/datasets.py cifar-10"""


def load(folder: Path, names: tuple[str, ...]) -> TensorDataset:
    """The images and classes of these files. They stay bytes: floats would take four times the memory."""
    records = torch.cat([read(folder / name) for name in names])
    labels = records[:, 0].long()
    if labels.max() >= CLASSES:
        raise quorate.RequestError(
            f"A class in {folder} is {labels.max()}; they should be from 0 to {CLASSES - 1}.\n{HOW_TO_GET_IT}"
        )
    # Contiguous: a batch is then selected from it at once, without a look at each image.
    return TensorDataset(records[:, 1:].contiguous().view(-1, 3, SIDE, SIDE), labels)


def read(file: Path) -> torch.Tensor:
    if not file.is_file():
        raise quorate.RequestError(f"There is no {file.name} in {file.parent} (params.data).\n{HOW_TO_GET_IT}")
    content = torch.from_numpy(numpy.fromfile(file, numpy.uint8))
    if not len(content) or len(content) % BYTES:
        raise quorate.RequestError(
            f"{file} is damaged: it has {len(content):,} bytes, which is not a multiple of {BYTES:,}, as many as a "
            f"image and its class take.\n{HOW_TO_GET_IT}"
        )
    return content.view(-1, BYTES)


def cropped_and_flipped(images: torch.Tensor, margin: int = 4) -> torch.Tensor:
    """Each image moved by up to `margin` pixels each way, and mirrored or not.

    All of a batch at once, on the device, and drawn from torch's generator, whose stream belongs to the step and the
    lane: the same on any number of workers.
    """
    batch, _, side, _ = images.shape
    device = images.device
    # What a crop shows beyond the edge is black.
    padded = torch.nn.functional.pad(images, (margin,) * 4)
    straight = torch.arange(side, device=device)
    rows = torch.randint(0, 2 * margin + 1, (batch, 1), device=device) + straight
    columns = torch.randint(0, 2 * margin + 1, (batch, 1), device=device)
    is_flipped = torch.randint(0, 2, (batch, 1), device=device) == 1
    columns = columns + torch.where(is_flipped, side - 1 - straight, straight)
    numbers = torch.arange(batch, device=device)
    picked = padded[numbers[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return picked.permute(0, 3, 1, 2)
