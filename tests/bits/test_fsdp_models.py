"""Models and ways of cutting them that FSDP2 does not take by itself as one process does."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import gang
from bits import bit_tasks as tasks
from bits.test_ddp_bits import CLOSE, far
from bits.test_fsdp_bits import KEYS, Block, Exact, Tower, train
from quorate.core.errors import TaskError
from quorate.strategies.gangs.fsdp import check_fused
from quorate.strategies.gangs.sharded_model import check_units
from quorate.task.task import Task

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


class Uneven(Tower):
    """Blocks of different sizes, of which a lane may leave some out: Gloo would abort the process."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(10), Block(10), Block(10)])
        self.blocks[2].up, self.blocks[2].down = nn.Linear(10, 5), nn.Linear(5, 10)

    def forward(self, inputs: torch.Tensor, order: Sequence[int] = (0, 1, 2), used: int = 3) -> torch.Tensor:
        inputs = self.enter(inputs)
        for number in order:
            out = self.blocks[number](inputs)
            inputs = out if number < used else inputs
        result: torch.Tensor = self.leave(self.norm(inputs))
        return result


class Uneasy(Exact):
    """Each worker goes through the blocks in an order of its own."""

    orders: ClassVar[tuple[Sequence[int], Sequence[int]]] = (0, 1, 2), (0, 1, 2)

    def model(self) -> nn.Module:
        return Uneven().double()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        order = self.orders[dist.get_rank()] if model.training else (0, 1, 2)
        return F.mse_loss(model(inputs.double(), order).squeeze(-1), targets.double())


class OtherOrder(Uneasy):
    orders = (0, 1, 2), (0, 2, 1)


class FewerUnits(Uneasy):
    orders = (0, 1, 2), (0, 1)


class MoreUnits(Uneasy):
    orders = (0,), (0, 1, 2)


class UnusedOutput(Uneasy):
    """Both run all blocks, and the loss of one does not depend on what the last gives."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        used = 2 if dist.get_rank() else 3
        return F.mse_loss(model(inputs.double(), used=used).squeeze(-1), targets.double())


class OtherEvaluation(Uneasy):
    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        order = (0, 1, 2) if dist.get_rank() else (0, 1)
        return {"loss": F.mse_loss(model(inputs.double(), order).squeeze(-1), targets.double())}


class Alternating(Uneven):
    """Leaves a block out in every other step, in all lanes alike: a buffer counts them."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if self.training:
            self.count += 1
        return super().forward(inputs, (0, 1, 2) if int(self.count) % 2 else (0, 2))


class InTurns(Exact):
    def model(self) -> nn.Module:
        return Alternating().double()


@pytest.mark.parametrize(
    ("task", "mesh", "keys"),
    [
        pytest.param(Exact, SHARD_2 | {"reshard": False}, {}, marks=pytest.mark.long),
        (Exact, SHARD_2 | {"offload": True}, {"clip_norm": 0.1}),
        pytest.param(
            Exact,
            SHARD_2 | {"tensor": 2},
            {"memory": {"checkpoint_activations": "blocks.*"}},
            marks=pytest.mark.long,
        ),
        pytest.param(Mixed, SHARD_2 | {"tensor": 2}, {"clip_norm": 0.05}, marks=pytest.mark.long),
        (SometimesUsed, SHARD_2, {"steps": 12, "batch_size": 4, "lanes": 2}),
        pytest.param(InTurns, SHARD_2, {}, marks=pytest.mark.long),
    ],
    ids=["reshard", "offload", "activations", "mixed", "sometimes", "in turns"],
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


class OfOneType(nn.BatchNorm1d):
    """As cuDNN takes it."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        assert self.weight.dtype == self.running_mean.dtype  # type: ignore[union-attr]
        return super().forward(inputs)


class Normed(tasks.Momentum):
    def model(self) -> nn.Module:
        normed = [nn.Unflatten(1, (2, 4)), OfOneType(2), nn.Flatten()]
        return nn.Sequential(nn.Linear(tasks.FEATURES, 8), *normed, nn.ReLU(), nn.Linear(8, 1))


def test_a_batch_norm_is_gathered_in_the_type_of_its_statistics(tmp_path: Path) -> None:
    sharded = train(Normed, SHARD_2 | {"gather": "bf16", "reduce": "fp32"}, tmp_path / "sharded", **FEW)
    assert len(sharded.losses) == FEW["steps"]


@pytest.mark.parametrize(
    ("task", "where", "found"),
    [
        (OtherOrder, "step 1", "worker 0: the forward pass of 'blocks.1'; worker 1: the forward pass of 'blocks.2'"),
        (FewerUnits, "step 1", "worker 0: the forward pass of 'blocks.2'; worker 1: the backward pass of the model"),
        pytest.param(
            MoreUnits,
            "step 1",
            "worker 0: the backward pass of the model itself; worker 1: the forward pass of 'blocks",
            marks=pytest.mark.long,
        ),
        (
            UnusedOutput,
            "step 1",
            "worker 0: the backward pass of 'blocks.2'; worker 1: the backward pass of 'blocks.1'",
        ),
        (OtherEvaluation, "an evaluation", "worker 0: the forward pass of the model itself; worker 1: the forward"),
    ],
)
def test_workers_that_go_through_different_parts_are_told_which(
    task: type[Task], where: str, found: str, tmp_path: Path
) -> None:
    keys: dict[str, Any] = FEW | {"strategy": {"kind": "fsdp", "shard": 2}, "workers": 2, "evaluate": {"every": 2}}
    failure = gang.train(task, gang.job(task, **keys), 2, tmp_path).failure
    assert failure.kind == "UnsupportedModelError"
    assert failure.message.startswith(f"In {where} workers go through different parts of the model. ")
    assert found in failure.message


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.ModuleDict({"one": nn.Linear(2, 2)}), "the model is a ModuleDict, which has no forward"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), "'0.bias' is torch.float32 and '1.bias' is"),
        (nn.PReLU(0), r"'weight' has no elements \(its shape is \(0,\)\).*set its requires_grad to False"),
    ],
)
def test_what_cannot_be_gathered_is_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        check_units(model, [""])


def test_fused_kernels_that_shards_do_not_have_are_refused() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    with pytest.raises(TaskError, match=r"gives SGD with fused=True, .*Leave `fused` out"):
        check_fused(torch.optim.SGD(parameters, lr=0.1, fused=True))
    check_fused(torch.optim.SGD(parameters, lr=0.1))
    check_fused(torch.optim.AdamW(parameters, lr=0.1, fused=True))
