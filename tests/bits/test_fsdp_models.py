"""Models and ways of cutting them that FSDP2 does not take by itself as one process does."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gang
from bits import bit_tasks as tasks
from bits.test_ddp_bits import CLOSE, far
from bits.test_fsdp_bits import KEYS, PLAN, Exact, Tower, train
from quorate.core.errors import TaskError
from quorate.training.shard_units import check_units

pytestmark = pytest.mark.usefixtures("unmeasured")

FEW: dict[str, Any] = KEYS | {"steps": 6}
SHARD_2: dict[str, Any] = {"shard": 2}


class Mixed(Exact):
    """Parameters that are shared, and some that are not trained."""

    def model(self) -> nn.Module:
        model = Tower().double()
        model.blocks[1].up.weight = model.blocks[0].up.weight  # type: ignore[union-attr]
        model.blocks[2].requires_grad_(False)
        model.enter.bias.requires_grad_(False)
        return model


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.often, self.rarely = nn.Linear(tasks.FEATURES, 1), nn.Linear(tasks.FEATURES, 1)

    def forward(self, inputs: torch.Tensor, is_rare: bool) -> torch.Tensor:
        out: torch.Tensor = self.rarely(inputs) if is_rare else self.often(inputs)
        return out


class SometimesUsed(tasks.Regression):
    """Which parameters get a gradient differs from lane to lane, and in some steps none of them gives it to one. The
    optimizer would move that by a gradient of zero."""

    def model(self) -> nn.Module:
        return Either().double()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        return F.mse_loss(model(inputs.double(), bool(targets[0] > 1.5)).squeeze(-1), targets.double())

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)


class Shuffled(Tower):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = self.enter(inputs)
        for number in torch.randperm(3).tolist():
            inputs = self.blocks[number](inputs)
        out: torch.Tensor = self.leave(self.norm(inputs))
        return out


class InAnyOrder(Exact):
    """Blocks of one shape, so that nothing but the weights themselves is wrong with what is gathered."""

    def model(self) -> nn.Module:
        return Shuffled().double()


@pytest.mark.parametrize(
    ("task", "mesh", "keys"),
    [
        (Exact, SHARD_2 | {"reshard": False}, {}),
        (Exact, SHARD_2 | {"offload": True}, {"clip_norm": 0.1}),
        pytest.param(
            Exact,
            SHARD_2 | {"tensor": 2, "plan": PLAN},
            {"memory": {"checkpoint_activations": "blocks.*"}},
            marks=pytest.mark.long,
        ),
        pytest.param(Mixed, SHARD_2 | {"tensor": 2, "plan": PLAN}, {"clip_norm": 0.05}, marks=pytest.mark.long),
        (SometimesUsed, SHARD_2, {"steps": 12, "batch_size": 4, "lanes": 2}),
    ],
    ids=["reshard", "offload", "activations", "mixed", "sometimes"],
)
def test_losses_are_those_of_one_process(
    task: type[Any], mesh: dict[str, Any], keys: dict[str, Any], tmp_path: Path
) -> None:
    alone = train(task, None, tmp_path / "alone", **FEW | keys)
    sharded = train(task, mesh, tmp_path / "sharded", **FEW | keys)
    assert far(alone.losses, sharded.losses) < CLOSE
    (metric, value), *_ = alone.progress["metrics"].items()
    assert sharded.progress["metrics"][metric] == pytest.approx(value, rel=CLOSE)


def test_weights_that_travel_in_16_bits_need_no_change_of_the_task(tmp_path: Path) -> None:
    alone = train(tasks.Momentum, None, tmp_path / "alone", **FEW)
    sharded = train(tasks.Momentum, SHARD_2 | {"gather": "bf16", "reduce": "fp32"}, tmp_path / "sharded", **FEW)
    assert 0 < far(alone.losses, sharded.losses) < 0.02


def test_workers_that_gather_different_parts_are_found_out_before_a_weight_changes(tmp_path: Path) -> None:
    spec = gang.job(InAnyOrder, **FEW | {"strategy": {"kind": "fsdp", "shard": 2}, "workers": 2})
    failure = gang.train(InAnyOrder, spec, 2, tmp_path).failure
    assert failure.step == 1
    assert "worker 1 went through other parts of the model than worker 0" in failure.message


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.ModuleDict({"one": nn.Linear(2, 2)}), "the model is a ModuleDict, which has no forward"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), "'0.bias' is torch.float32 and '1.bias' is"),
    ],
)
def test_what_cannot_be_gathered_is_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        check_units(model, [""])
