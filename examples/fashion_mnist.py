"""Fashion-MNIST: 70,000 pictures of clothes, 28×28 pixels, in ten classes. A small CNN passes 90 % in a minute or two.

::

    python scripts/datasets.py fashion-mnist          # fetches the data into data/fashion-mnist
    quorate train examples/fashion_mnist.yaml

The data is four files in the idx format, gzipped or not, in the folder that `params.data` names. A relative path counts
from the folder of this file, as `task` counts from that of the job file: a job means the same wherever it is typed.
"""

import math
import struct
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import quorate

CLASSES = 10
SIDE = 28
BYTES_IN_IDX = bytes([0, 0, 8])
HOW_TO_GET_IT = """To fetch it into data/fashion-mnist:
  python scripts/datasets.py fashion-mnist
On Debian and Ubuntu also:
  apt install dataset-fashion-mnist
and train with --set params.data=/usr/share/datasets/fashion-mnist"""


class FashionMnist(quorate.Task):
    data: Path = Path("../data/fashion-mnist")
    learning_rate: float = 0.1
    width: int = 16

    def model(self) -> nn.Module:
        model = SmallCnn(self.width)
        # With the channels last, convolutions take about two thirds of the time on a CPU.
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def datasets(self) -> tuple[TensorDataset, TensorDataset]:
        folder = (Path(__file__).parent / self.data.expanduser()).resolve()
        return load(folder, "train"), load(folder, "t10k")

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            model.parameters(), lr=self.learning_rate, momentum=0.9, nesterov=True, weight_decay=5e-4
        )

    def metrics(self, model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        images, labels = batch
        scores = model(images)
        return {"accuracy": (scores.argmax(1) == labels).float().mean(), "loss": F.cross_entropy(scores, labels)}


class SmallCnn(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *block(1, width, nn.MaxPool2d(2)),
            *block(width, 2 * width, nn.MaxPool2d(2)),
            *block(2 * width, 4 * width),
        )
        self.classify = nn.Linear(4 * width * 7 * 7, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        # Pixels stay bytes until here: a dataset of floats would take four times the memory in every worker.
        pixels = (images.unsqueeze(1) / 255).contiguous(memory_format=torch.channels_last)
        scores: torch.Tensor = self.classify(self.features(pixels).flatten(1))
        return scores


def block(inputs: int, outputs: int, *pool: nn.Module) -> tuple[nn.Module, ...]:
    # Pooled first: a quarter of the numbers is left to normalise.
    return nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), *pool, nn.BatchNorm2d(outputs), nn.ReLU()


def load(folder: Path, part: str) -> TensorDataset:
    """The images and labels of a part of the data, `train` or `t10k`."""
    images, labels = read_idx(folder, f"{part}-images-idx3-ubyte"), read_idx(folder, f"{part}-labels-idx1-ubyte")
    expected = (labels.numel(), SIDE, SIDE)
    if images.shape != expected:
        raise quorate.RequestError(
            f"The {part} files in {folder} do not fit together: the images have the shape {tuple(images.shape)}, "
            f"and with {labels.numel():,} labels it should be {expected}.\n{HOW_TO_GET_IT}"
        )
    if labels.numel() and labels.max() >= CLASSES:
        raise quorate.RequestError(
            f"A label of {part}-labels-idx1-ubyte in {folder} is {labels.max()}; they should be from 0 to "
            f"{CLASSES - 1}.\n{HOW_TO_GET_IT}"
        )
    return TensorDataset(images, labels.view(-1).long())


def read_idx(folder: Path, name: str) -> torch.Tensor:
    """The bytes of an idx file, in the shape that its header tells: 00 00, the type, how many sizes, each size."""
    file = find(folder, name)
    content, is_whole = unpacked(file)
    if not content.startswith(BYTES_IN_IDX):
        begins = content[: len(BYTES_IN_IDX)].hex(" ") or "nothing"
        raise damaged(file, f"it begins with {begins}, and idx files of bytes with {BYTES_IN_IDX.hex(' ')}")
    dimensions = int.from_bytes(content[3:4])
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise damaged(file, f"it ends within its header, after {len(content)} of {start} bytes")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    promised, held = math.prod(shape), len(content) - start
    if held != promised or not is_whole:
        sizes = " × ".join(f"{size:,}" for size in shape)
        ending = "" if is_whole else ", and its end is missing"
        raise damaged(file, f"its header promises {sizes} = {promised:,} bytes, and it holds {held:,}{ending}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)[start:].view(shape)


def find(folder: Path, name: str) -> Path:
    """The file of that name, gzipped or not."""
    for file in (folder / name, folder / f"{name}.gz"):
        if file.is_file():
            return file
    if folder.is_dir():
        raise quorate.RequestError(f"There is no {name}.gz in {folder} (params.data).\n{HOW_TO_GET_IT}")
    raise quorate.RequestError(
        f"There is no {name}.gz, since there is no folder {folder} (params.data; a relative path counts from "
        f"{Path(__file__).parent}).\n{HOW_TO_GET_IT}"
    )


def unpacked(file: Path) -> tuple[bytes, bool]:
    """What a file holds, and whether that is all; of a gzipped file that was cut off, what can be read."""
    content = file.read_bytes()
    if file.suffix != ".gz":
        return content, True
    unpacking = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        return unpacking.decompress(content), unpacking.eof
    except zlib.error as error:
        raise damaged(file, f"it has {len(content):,} bytes and cannot be unpacked ({error})") from None


def damaged(file: Path, how: str) -> quorate.RequestError:
    return quorate.RequestError(f"{file} is damaged: {how}.\n{HOW_TO_GET_IT}")
