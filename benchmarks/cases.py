"""The models and data that all systems train, alike: in memory, shuffled, with the same optimizer.

Only torch is imported here: the peers' interpreter needs nothing of Quorate's.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 10
Batch = list[torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model, the shape of its samples, and how many of them are in a batch."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch_size: int


def tiny_mlp() -> nn.Module:
    """So small that a step is mostly Python."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES))


def small_cnn() -> nn.Module:
    """Two convolutions and two linear layers; no batch norm, whose statistics the systems treat differently."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 14 * 14, 64),
        nn.ReLU(),
        nn.Linear(64, CLASSES),
    )


def deep_mlp() -> nn.Module:
    """Sixteen layers of 257 KiB and a small one: its gradient comes bit by bit, evenly over the backward pass."""
    layers = [layer for _ in range(16) for layer in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(256, CLASSES))


CASES = {
    "tiny-mlp": Case(tiny_mlp, (64,), 32),
    "cnn": Case(small_cnn, (1, 28, 28), 32),
    "deep-mlp": Case(deep_mlp, (256,), 32),
}


WIDTH = 1024
SIZED_BATCH = 16


class Block(nn.Module):
    """A layer that adds to what it is given, so that the signal neither fades nor grows in many of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """What came in, and something on top."""
        normal = nn.functional.layer_norm(inputs, (WIDTH,))
        return inputs + nn.functional.relu(self.layer(normal))


def sized_mlp(state_bytes: int) -> nn.Module:
    """As many blocks as make a state of this size, with its optimizer: the weights, and a momentum for each.

    Nearly all of a step is to compute with the weights, and all of them change in every step.
    """
    weights = state_bytes // 8
    blocks = (weights - CLASSES * (WIDTH + 1)) // (WIDTH * (WIDTH + 1))
    # What is left over makes the last layer wider than there are classes.
    width = (weights - blocks * WIDTH * (WIDTH + 1)) // (WIDTH + 1)
    return nn.Sequential(*(Block() for _ in range(blocks)), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, width))


def sized_case(state_bytes: int) -> Case:
    """A state of this size."""
    return Case(lambda: sized_mlp(state_bytes), (WIDTH,), SIZED_BATCH)


def data_of(case: Case, samples: int) -> TensorDataset:
    """Random samples, the same each time."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, *case.shape, generator=generator)
    return TensorDataset(inputs, torch.randint(CLASSES, (samples,), generator=generator))


def loader_of(case: Case, samples: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    """What a hand-written loop reads from."""
    return DataLoader(data_of(case, samples), batch_size=case.batch_size, shuffle=True)


def endless(loader: DataLoader[tuple[torch.Tensor, ...]]) -> Iterator[Batch]:
    """Epoch after epoch."""
    while True:
        yield from loader


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The same for every system."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The same for every system."""
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)
