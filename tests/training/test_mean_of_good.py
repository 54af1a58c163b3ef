"""Bad samples that are left out leave the mean of the others, as a collate that filters gives in plain PyTorch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gang
from bits.bit_tasks import FEATURES, Points, Regression
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.digests import derive_seed
from quorate.data.bad_sample import BadSample
from quorate.data.streams import seed_generators
from quorate.spec.job import JobSpec
from quorate.task.task import Task
from quorate.worker.assembly import sampler_of
from training.recorded import Run, run

pytestmark = pytest.mark.usefixtures("unmeasured")

KEYS: dict[str, Any] = {"batch_size": 10, "steps": 5, "on_bad_sample": "skip"}
TORN = frozenset({*range(0, 50, 3), *range(1, 20, 2)})


class Torn(Points):
    def __getitem__(self, index: int) -> Any:
        if index in TORN:
            raise BadSample("torn")
        return super().__getitem__(index)


class Exact(Regression):
    """In double precision, where another order of additions is far below what a wrong weight does."""

    learning_rate: float = 0.05

    def model(self) -> nn.Module:
        return super().model().double()

    def datasets(self) -> Any:
        return Torn()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        return F.mse_loss(model(inputs.double()).squeeze(-1), targets.double())


class Counted(Exact):
    """By their own count, whatever was planned."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch) * len(batch[0]), len(batch[0])


class Both(Exact):
    """One optimizer by samples, one by its own count."""

    def model(self) -> nn.Module:
        return nn.ModuleDict({name: nn.Linear(FEATURES, 1).double() for name in ("mean", "counted")})

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert isinstance(model, nn.ModuleDict)
        mean, counted = (super(Both, self).loss(model[name], batch) for name in ("mean", "counted"))
        return {"mean": mean, "counted": (counted * len(batch[0]), len(batch[0]))}

    def optimizer(self, model: nn.Module) -> Any:
        assert isinstance(model, nn.ModuleDict)
        return {name: torch.optim.SGD(model[name].parameters(), lr=1e-8) for name in ("mean", "counted")}


def by_hand(task: Task, spec: JobSpec) -> tuple[dict[str, torch.Tensor], list[dict[str, float]], int]:
    """A plain loop over the good samples of each batch; its norms, and how many samples it left out."""
    seed_generators(derive_seed(spec.seed, "build"))
    model = task.model()
    given = task.optimizer(model)
    optimizers = given if isinstance(given, dict) else {"": given}
    order, points = sampler_of(spec, task, Torn()), Points()
    norms, left_out = [], 0
    for step in range(1, order.total_steps + 1):
        batch = order.batch(step).tolist()
        good = [index for index in batch if index not in TORN]
        left_out += len(batch) - len(good)
        losses = task.loss(model, (points.inputs[good], points.targets[good]))
        told = {}
        for name, loss in (losses if isinstance(losses, Mapping) else {"": losses}).items():
            mean = loss[0] / loss[1] if isinstance(loss, tuple) else loss
            optimizers[name].zero_grad()
            mean.backward()
            parameters = [p for group in optimizers[name].param_groups for p in group["params"]]
            told[name] = nn.utils.clip_grad_norm_(parameters, spec.clip_norm or float("inf")).item()
        for optimizer in optimizers.values():
            optimizer.step()
        norms.append(told)
    return dict(model.named_parameters()), norms, left_out


def weights(ran: Run) -> dict[str, torch.Tensor]:
    folder = CheckpointFolder(ran.folder / "checkpoints")
    newest = folder.search().newest
    assert newest is not None
    tensors: dict[str, torch.Tensor] = folder.load(newest).state["replica"]["tensors"]
    return tensors


@pytest.mark.parametrize(
    ("task", "keys"),
    [
        (Exact, {"lanes": 1}),
        (Exact, {"lanes": 3, "accumulate": 2, "clip_norm": 0.2}),
        (Both, {"lanes": 3}),
        pytest.param(Exact, {"lanes": 1, "clip_norm": 0.2}, marks=pytest.mark.long),
        pytest.param(Exact, {"lanes": 4, "overlap": False}, marks=pytest.mark.long),
        pytest.param(Exact, {"lanes": 4, "links": "tcp", "bucket_mb": 0.0001}, marks=pytest.mark.long),
        pytest.param(Counted, {"lanes": 4}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_mean_over_the_samples_that_were_read(task: type[Exact], keys: dict[str, Any], tmp_path: Path) -> None:
    workers = (1, 2, 3) if keys["lanes"] > 1 else (1,)
    ran = [run(task, tmp_path / str(number), number, **KEYS | keys) for number in workers]
    assert len({each.ended.digest for each in ran}) == 1
    expected, norms, left_out = by_hand(task(), gang.job(task, **KEYS | keys))
    assert ran[0].ended.progress["bad"] == left_out > 20
    for name, value in weights(ran[0]).items():
        torch.testing.assert_close(value, expected[name].detach(), rtol=1e-9, atol=1e-12)
    for name in norms[0]:
        told = ran[0].fields("step", f"gradient_norm.{name}" if name else "gradient_norm")
        assert list(told.values()) == pytest.approx([each[name] for each in norms], rel=1e-9)
