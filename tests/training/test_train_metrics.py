"""train_metrics_every: metrics of training batches, the same on any number of workers, and no other bits for it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics.classification import BinaryF1Score

import gang
from bits.bit_tasks import BatchNormAndDropout, NoisyOptimizer, Regression
from quorate.core.errors import TaskError
from quorate.observe.event import Event
from quorate.observe.events import StepCompleted
from quorate.task.task import Task
from quorate.worker.assembly import build_samples


class Measures(BatchNormAndDropout):
    """In evaluation mode, drawing at random, and with a sum that is not of samples."""

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        assert not model.training
        inputs, targets = batch
        found = model(inputs).squeeze(-1)
        self.log("ignored", 1.0)
        f1 = BinaryF1Score()
        f1.update(found, (targets > 0).long())
        positive = targets > 0
        return {
            "loss": self.loss(model, batch),
            "distance": (found - targets).abs().mean(),
            "positive": (found[positive].sum(), positive.sum()),
            "noise": torch.rand(()),
            "f1": f1,
        }


class Noisy(NoisyOptimizer):
    metrics = Measures.metrics


class Plain(Regression):
    metrics = Measures.metrics


def trained(task: type[Task], count: int, folder: Path, **keys: Any) -> tuple[str, dict[int, dict[str, float]]]:
    folder.mkdir()
    told = folder / "told.jsonl"
    told.touch()

    def listen(position: int, loop: Any) -> None:
        publish = loop.publish

        def write(event: Event) -> None:
            if position == 0 and isinstance(event, StepCompleted):
                with told.open("a") as file:
                    file.write(json.dumps([event.step, event.log]) + "\n")
            publish(event)

        loop.publish = write

    ended = gang.train(task, gang.job(task, **keys), count, folder, sabotage=listen)
    assert not ended.failures, ended.failures[0]
    logged = [json.loads(line) for line in told.read_text().splitlines()]
    return ended.digest, {step: log for step, log in logged if log}


@pytest.mark.parametrize("task", [Measures, pytest.param(Noisy, marks=pytest.mark.long)])
def test_they_are_the_same_on_any_number_of_workers_and_change_nothing(task: type[Task], tmp_path: Path) -> None:
    without, nothing = trained(task, 1, tmp_path / "without", accumulate=2)
    alone = trained(task, 1, tmp_path / "1", accumulate=2, train_metrics_every=2)
    assert trained(task, 3, tmp_path / "3", accumulate=2, train_metrics_every=2) == alone
    digest, logged = alone
    assert (digest, nothing) == (without, {})
    assert logged.keys() == {2, 4, 6}
    assert logged[2].keys() == {"distance", "positive", "noise"}


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        {"kind": "fsdp", "shard": 2},
        {"kind": "parameter-server", "servers": 2},
        {"kind": "parameter-server", "mode": "bounded", "staleness": 1},
    ],
    ids=str,
)
def test_every_strategy_tells_them(strategy: Any, tmp_path: Path) -> None:
    keys = {"workers": 2} if "shard" in strategy else {}
    task = Plain if keys else Measures
    _, logged = trained(task, 2, tmp_path / "several", strategy=strategy, train_metrics_every=2, **keys)
    if "mode" not in strategy:  # where servers tell of steps, and no worker does
        assert logged.keys() == {2, 4, 6}


def test_a_task_without_metrics_of_its_own_has_none_to_tell() -> None:
    spec = gang.job(Regression, train_metrics_every=5)
    with pytest.raises(TaskError, match="train_metrics_every: 5 asks for metrics of training batches"):
        build_samples(Regression(), spec)
