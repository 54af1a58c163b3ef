"""The cases as tasks, for jobs of Quorate."""

import os
import time
from pathlib import Path
from typing import Any

from torch import nn, optim
from torch.utils.data import Dataset, TensorDataset

from benchmarks.cases import CASES, Batch, data_of, loss_of, optimizer_of, sized_case
from quorate.own_loop.run import Run
from quorate.task.task import Task


class CaseTask(Task):
    """One of the cases, with so many samples."""

    case: str
    samples: int

    def model(self) -> nn.Module:
        """The case's model."""
        return CASES[self.case].build()

    def datasets(self) -> TensorDataset:
        """A training set only: nothing is evaluated in between."""
        return data_of(CASES[self.case], self.samples)

    def loss(self, model: nn.Module, batch: Batch) -> object:
        """The same as everywhere."""
        return loss_of(model, batch)

    def optimizer(self, model: nn.Module) -> optim.Optimizer:
        """The same as everywhere."""
        return optimizer_of(model)


def case_loop(run: Run, case: str, samples: int) -> None:
    """The same with a training loop of one's own, which reads the loss at every step as others do."""
    model = CASES[case].build()
    model, _ = run.prepare(model, optimizer_of(model))
    losses = []
    for batch in run.batches(data_of(CASES[case], samples)):
        result = run.step(loss_of(model, batch))
        if result is not None:
            losses.append(result.loss)


class OneByOne(Dataset[Any]):
    """The samples of another dataset, one by one by code, as those of most are: so there is work for loaders."""

    def __init__(self, samples: TensorDataset) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]


class PausingTask(CaseTask):
    """A case whose every lane takes a given time, without using a core for it."""

    pause_s: float

    def datasets(self) -> Any:
        """The same, for loaders."""
        return OneByOne(super().datasets())

    def loss(self, model: nn.Module, batch: Batch) -> object:
        """The same as everywhere, later."""
        time.sleep(self.pause_s)
        return super().loss(model, batch)


class TrialTask(PausingTask):
    """The same with a validation set: a search compares what comes out."""

    def datasets(self) -> Any:
        """The training set twice."""
        return (super().datasets(),) * 2


class SlowedTask(PausingTask):
    """The same, in which one worker, the first that comes, takes `factor` times as long for each lane."""

    factor: float
    mark: str
    """A file that the slow one makes."""

    def loss(self, model: nn.Module, batch: Batch) -> object:
        """The same as everywhere, later still in one worker."""
        if self._is_slow:
            time.sleep((self.factor - 1) * self.pause_s)
        return super().loss(model, batch)

    @property
    def _is_slow(self) -> bool:
        # On the disk: what a lane leaves in the task does not outlive it.
        try:
            with Path(self.mark).open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            return Path(self.mark).read_text() == str(os.getpid())
        return True


class SizedTask(Task):
    """A state of so many bytes, weights and optimizer together, with so many samples."""

    state_bytes: int
    samples: int

    def model(self) -> nn.Module:
        """Of this size."""
        return sized_case(self.state_bytes).build()

    def datasets(self) -> TensorDataset:
        """A training set only: nothing is evaluated in between."""
        return data_of(sized_case(self.state_bytes), self.samples)

    def loss(self, model: nn.Module, batch: Batch) -> object:
        """The same as everywhere."""
        return loss_of(model, batch)

    def optimizer(self, model: nn.Module) -> optim.Optimizer:
        """The same as everywhere."""
        return optimizer_of(model)
