"""The same loop with Lightning Fabric."""

from importlib import import_module
from typing import Any

from benchmarks.cases import loader_of, loss_of, optimizer_of
from benchmarks.laps import Training, measure_steps

# By name: what checks the types of this file does not have it.
fabric_module: Any = import_module("lightning.fabric")


def train(training: Training) -> None:
    """A model, an optimizer and a loader, all set up by Fabric."""
    fabric = fabric_module.Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    built = training.case.build()
    model, optimizer = fabric.setup(built, optimizer_of(built))
    loader = fabric.setup_dataloaders(loader_of(training.case, training.samples))
    losses: list[float] = []
    for batch in loader:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
        training.laps.complete()


if __name__ == "__main__":
    measure_steps(train)
