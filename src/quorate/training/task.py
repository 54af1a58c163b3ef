"""What a user writes: model, data, loss, optimizer, evaluation."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from quorate.core.user_code import given
from quorate.data.collate import collate

Loss = torch.Tensor | tuple[torch.Tensor, Any]
"""A mean over the samples of the batch, or (sum, count) for a mean over something else, such as tokens."""

LOG = "_log"
"""Where a task keeps the numbers that it logs."""


class Task:
    """The user's side of a job. Subclass it, and write four methods of ordinary PyTorch.

    ::

        class Digits(quorate.Task):
            learning_rate: float = 0.1            # filled from the job file's `params`, typed and checked

            def model(self):
                return nn.Linear(64, 10)

            def datasets(self):
                return training_set, validation_set       # anything with len() and []

            def loss(self, model, batch):
                images, labels = batch
                return F.cross_entropy(model(images), labels)

            def optimizer(self, model):
                return torch.optim.SGD(model.parameters(), lr=self.learning_rate)

    Lanes share the process of whoever hosts them, so nothing may pass from one call of loss() to the next: what it
    assigns is put back at the end of a lane. Keep what training must remember in buffers of the model, and change
    parameters in the optimizer only.
    """

    buffer_rules: ClassVar[Mapping[str, str]] = {}
    """For buffers that training changes differently in each lane: name (or pattern) → "mean" or "lane 0"."""

    def model(self) -> torch.nn.Module:
        """Build the model. Random weights come from torch's global generator, which is seeded."""
        raise NotImplementedError

    def datasets(self) -> Any:
        """Return the training set, or (training set, validation set): anything with len() and []."""
        raise NotImplementedError

    def loss(self, model: torch.nn.Module, batch: Any) -> Any:
        """Return the loss: a mean over the samples, (sum, count), or a dict by optimizer name."""
        raise NotImplementedError

    def optimizer(self, model: torch.nn.Module) -> Any:
        """Return an optimizer, or a dict of them by name."""
        raise NotImplementedError

    def metrics(self, model: torch.nn.Module, batch: Any) -> Mapping[str, Any]:
        """Evaluate a batch: name → mean over its samples, or name → (sum, count). By default the loss.

        It is tried on one batch before the first step, in a process of its own: a mistake in it must not cost an epoch.
        """
        loss = self.loss(model, batch)
        return loss if isinstance(loss, dict) else {"loss": loss}

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:  # noqa: ARG002
        """Return a torch learning-rate scheduler, stepped per update; a plateau kind after each evaluation."""
        return None

    def collate(self, samples: Sequence[Any]) -> Any:
        """Turn samples into a batch. They may be nested dicts, tuples and dataclasses of tensors and numbers."""
        return collate(samples)

    def order(self, epoch: int, generator: torch.Generator) -> Sequence[int] | None:  # noqa: ARG002
        """Return the indices of an epoch in order; None shuffles them all."""
        return None

    def initial_weights(self) -> Mapping[str, torch.Tensor] | None:
        """Return a state dict to start from; None keeps what model() built."""
        return None

    def log(self, name: str, value: float | torch.Tensor) -> None:
        """Note a number of one's own, from within loss(); a step reports its mean over the samples."""
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"self.log({name!r}, ...) takes one number, and was given {given(value)}") from None
        self._noted().setdefault(name, []).append(number)

    def _noted(self) -> dict[str, list[float]]:
        noted: dict[str, list[float]] = self.__dict__.setdefault(LOG, {})
        return noted


def take_log(task: Task) -> dict[str, float]:
    """What was logged since the last call, averaged by name."""
    noted = task._noted()
    means = {name: sum(values) / len(values) for name, values in noted.items()}
    noted.clear()
    return means
