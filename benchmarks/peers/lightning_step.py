"""The same training with Lightning's Trainer: the loss is logged, without progress bar and checkpoints."""

import warnings
from importlib import import_module
from typing import Any

import torch

from benchmarks.cases import Batch, loader_of, loss_of, optimizer_of
from benchmarks.laps import Laps, Training, measure_steps

# By name: what checks the types of this file does not have it.
lightning: Any = import_module("lightning")
loggers: Any = import_module("lightning.pytorch.loggers")


class Module(lightning.LightningModule):  # type: ignore[misc]
    """The case as Lightning wants it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Batch, _: int) -> torch.Tensor:
        """The loss, which is logged."""
        loss = loss_of(self.model, batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The same as everywhere."""
        return optimizer_of(self.model)


class Clock(lightning.Callback):  # type: ignore[misc]
    """Hears of every step."""

    def __init__(self, laps: Laps) -> None:
        self._laps = laps

    def on_train_batch_end(self, *_: object) -> None:
        """One more."""
        self._laps.complete()


def train(training: Training) -> None:
    """All that Lightning does by itself, less what writes or draws for people."""
    warnings.simplefilter("ignore")
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=loggers.CSVLogger(training.folder),
        callbacks=[Clock(training.laps)],
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(training.case.build()), loader_of(training.case, training.samples))


if __name__ == "__main__":
    measure_steps(train)
