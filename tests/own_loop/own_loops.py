"""Training loops of one's own, and the tasks that they are the same as."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bits import bit_tasks
from quorate.own_loop.run import Run


class Noisy(bit_tasks.BatchNormAndDropout):
    """What `noisy` does, as a task: batch statistics, dropout, a scheduler, metrics and a number that is logged."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch)
        self.log("double", 2 * loss)
        return loss

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def clipped(run: Run) -> None:
    """Keeps what decides how it trains, clips by itself, draws where no lane's stream is, and does no epochs."""
    task = bit_tasks.Momentum()
    model = task.model()
    model, _ = run.prepare(model, task.optimizer(model))
    run.clip(0.5)
    run.state["scale"] = 1.0
    for inputs, targets in run.batches(task.datasets()[0]):
        result = run.step(run.state["scale"] * F.mse_loss(model(inputs).squeeze(-1), targets))
        torch.rand(3)
        if result is not None and result.loss is not None:
            run.state["scale"] = 1 / (1 + result.loss)


def unclipped(run: Run) -> None:
    """The same, where the job clips."""
    run.clip = lambda norm: None  # type: ignore[method-assign]
    clipped(run)


def noisy(run: Run, learning_rate: float = 1e-3) -> None:
    task = bit_tasks.BatchNormAndDropout()
    task.learning_rate = learning_rate
    model = task.model()
    optimizer = task.optimizer(model)
    model, optimizer, _ = run.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
    training, validation = task.datasets()

    def measure(batch: Any) -> dict[str, torch.Tensor]:
        inputs, targets = batch
        return {"loss": F.mse_loss(model(inputs).squeeze(-1), targets)}

    run.evaluate(validation, measure)
    for _ in run.epochs():
        for inputs, targets in run.batches(training):
            loss = F.mse_loss(model(inputs).squeeze(-1), targets)
            run.log("double", 2 * loss)
            run.step(loss)
