"""A first task, which trains as it is: does a point lie inside a circle? Put your own model and data in its place."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import quorate

Sample = tuple[torch.Tensor, torch.Tensor]  # a point, and its label


class Points(Dataset[Sample]):
    """Your data: anything with len() and []. These are made up, so that there is nothing to download."""

    def __init__(self, count: int, seed: int) -> None:
        self.points = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1
        self.labels = (self.points.norm(dim=1) < 0.8).long()

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Sample:
        return self.points[index], self.labels[index]


class SmallNet(nn.Module):
    """Your model: any module."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """Score both labels for each point."""
        scores: torch.Tensor = self.layers(points)
        return scores


class MyTask(quorate.Task):
    """What the job file's `task` names. Its fields are filled from the job file's `params`, typed and checked."""

    learning_rate: float = 0.01
    width: int = 32

    def model(self) -> nn.Module:
        """Build the model. Random weights depend on the job's `seed` only."""
        return SmallNet(self.width)

    def datasets(self) -> tuple[Points, Points]:
        """Return the training set and the validation set."""
        return Points(2048, seed=1), Points(1024, seed=2)

    def loss(self, model: nn.Module, batch: Sample) -> torch.Tensor:
        """Return the mean loss over the samples of a batch."""
        points, labels = batch
        return cross_entropy(model(points), labels)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Any optimizer of torch; a learning-rate schedule stands in the job file."""
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate)

    def metrics(self, model: nn.Module, batch: Sample) -> dict[str, torch.Tensor]:
        """Evaluate a batch of the validation set: means over its samples, by name."""
        points, labels = batch
        accuracy = (model(points).argmax(1) == labels).float().mean()
        return {"accuracy": accuracy, "loss": self.loss(model, batch)}
