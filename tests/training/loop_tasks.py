"""Tasks for what the loop does besides steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bits.bit_tasks import FEATURES, Points, Regression, TwoOptimizers


class Measured(Regression):
    """Metrics as a mean, as (sum, count), and as a tensor."""

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        inputs, targets = batch
        errors = (model(inputs).squeeze(-1) - targets).square()
        return {"loss": errors.mean(), "large": (float(errors.sum()), 2.0 * len(errors)), "size": len(targets)}


class Seen(Regression):
    """Metrics that count: which samples were evaluated, and how many batches."""

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        return {"targets": (batch[1].double().sum(), 1), "batches": (1, 1), "samples": (len(batch[1]), 1)}


class Scripted(Regression):
    """A loss of evaluation that follows a script: it counts the steps in a parameter of the model."""

    script: tuple[float, ...] = (3.0, 2.0, 2.5, 2.6, 1.0, 1.0)
    wrong_metric: bool = False

    def model(self) -> nn.Module:
        return nn.ModuleDict({"linear": nn.Linear(FEATURES, 1), "clock": _Clock()})

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert isinstance(model, nn.ModuleDict)
        model["clock"]()
        return F.mse_loss(model["linear"](batch[0]).squeeze(-1), batch[1])

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        assert isinstance(model, nn.ModuleDict)
        ticks = model["clock"].ticks
        assert isinstance(ticks, torch.Tensor)
        return {"f1" if self.wrong_metric else "loss": self.script[int(ticks) - 1]}


class NoNumber(Scripted):
    """An evaluation that comes to nothing."""

    script: tuple[float, ...] = (float("nan"),) * 6


class _Clock(nn.Module):
    ticks: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ticks", torch.tensor(0))

    def forward(self) -> None:
        self.ticks += 1


class Plateau(Scripted):
    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


class Halving(TwoOptimizers):
    """A rate for each step."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


class Logging(Regression):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.log("size", len(batch[1]))
        self.log("mean_target", batch[1].double().mean())
        if batch[1][0] > 0:
            self.log("sometimes", torch.tensor(2.5))
        return super().loss(model, batch)

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        self.log("from_metrics", 1.0)
        return {"loss": Regression.loss(self, model, batch)}


@dataclass
class Point:
    inputs: torch.Tensor
    target: torch.Tensor


class PointDataset(Points):
    def __getitem__(self, index: int) -> Any:
        return Point(self.inputs[index], self.targets[index])


class DictDataset(Points):
    def __getitem__(self, index: int) -> Any:
        return {"x": {"inputs": self.inputs[index]}, "y": (self.targets[index], index)}


class DataclassBatches(Regression):
    def datasets(self) -> Any:
        return PointDataset(), PointDataset(21)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert isinstance(batch, Point)
        return super().loss(model, (batch.inputs, batch.target))


class DictBatches(Regression):
    def datasets(self) -> Any:
        return DictDataset(), DictDataset(21)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, (batch["x"]["inputs"], batch["y"][0]))


class Preset(Regression):
    def initial_weights(self) -> Mapping[str, torch.Tensor]:
        return {name: torch.full_like(value, 0.01) for name, value in self.model().state_dict().items()}


class KeptInEvaluation(Regression):
    """A layer that the task keeps in evaluation mode while it trains the rest."""

    learning_rate: float = 1e-9

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        model[1].eval()
        return model

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert isinstance(model, nn.Sequential)
        self.log("modes", sum(module.training << i for i, module in enumerate(model)))
        return super().loss(model, batch)


class UnevenMicroBatches(Regression):
    """Batch normalization counts its batches, and lanes of a small last batch have different numbers of them."""

    def model(self) -> nn.Module:
        normed = [nn.Unflatten(1, (2, 4)), nn.BatchNorm1d(2), nn.Flatten()]
        return nn.Sequential(nn.Linear(FEATURES, 8), *normed, nn.Linear(8, 1))


class Growing(Regression):
    """A buffer that is one longer after each step, equally in all lanes."""

    learning_rate: float = 1e-8

    def model(self) -> nn.Module:
        return _Grows()


class _Grows(nn.Module):
    history: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 1)
        self.register_buffer("history", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.history = torch.cat([self.history, torch.ones(1)])
        out: torch.Tensor = self.linear(inputs) + self.history.sum() * 1e-3
        return out


class NothingCounted(Regression):
    """As with tokens that are all padding."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        wanted = torch.zeros(len(targets))
        return (F.mse_loss(model(inputs).squeeze(-1), targets, reduction="none") * wanted).sum(), wanted.sum()


class BadMetrics(Regression):
    result: str = "list"

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        if self.result == "list":
            return [1.0]  # type: ignore[return-value]
        if self.result == "triple":
            return {"loss": (1.0, 2.0, 3.0)}
        raise KeyError("no such metric")


class Ordered(Regression):
    """An order of one's own: some samples twice, most of them never."""

    def order(self, epoch: int, generator: torch.Generator) -> list[int]:
        return [epoch, *range(15), *range(10, 20), 3]
