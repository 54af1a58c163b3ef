"""The same loop with accelerate."""

from importlib import import_module
from typing import Any

from benchmarks.cases import loader_of, loss_of, optimizer_of
from benchmarks.laps import Training, measure_steps

# By name: what checks the types of this file does not have it.
accelerate: Any = import_module("accelerate")


def train(training: Training) -> None:
    """A model, an optimizer and a loader, all prepared by accelerate."""
    accelerator = accelerate.Accelerator(cpu=True)
    built = training.case.build()
    model, optimizer, loader = accelerator.prepare(
        built, optimizer_of(built), loader_of(training.case, training.samples)
    )
    losses: list[float] = []
    for batch in loader:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
        training.laps.complete()


if __name__ == "__main__":
    measure_steps(train)
