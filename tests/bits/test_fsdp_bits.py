"""A sharded gang comes to the losses of one process, on any mesh."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gang
from bits import bit_tasks as tasks
from bits.shapes import Shape, trained
from bits.test_ddp_bits import CLOSE, far
from quorate.task.task import Task

pytestmark = pytest.mark.usefixtures("unmeasured")

MESHES: dict[str, dict[str, Any]] = {
    "fsdp 1": {"shard": 1},
    "fsdp 2": {"shard": 2},
    "fsdp 4": {"shard": 4},
    "tp 2": {"shard": 1, "tensor": 2},
    "fsdp 2 x tp 2": {"shard": 2, "tensor": 2},
    "replicate 2 x shard 2": {"replicate": 2, "shard": 2},
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = inputs + self.down(torch.tanh(self.up(self.norm(inputs))))
        return out


class Tower(nn.Module):
    """Blocks whose sizes no mesh divides evenly, and batch norm, whose statistics lanes average."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(tasks.FEATURES, 10)
        self.blocks = nn.ModuleList(Block(10) for _ in range(3))
        self.norm = nn.BatchNorm1d(10)
        self.leave = nn.Linear(10, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = self.enter(inputs)
        for block in self.blocks:
            inputs = block(inputs)
        out: torch.Tensor = self.leave(self.norm(inputs))
        return out


class Exact(tasks.Momentum):
    """In float64: what differs is the order of additions alone."""

    def model(self) -> nn.Module:
        return Tower().double()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        return super().loss(model, (inputs.double(), targets.double()))

    def parallelize(self, model: nn.Module, mesh: Any) -> None:
        parallelize_module(model, mesh, {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()})


class NotSplit(tasks.Momentum):
    pass


class SplitsNothing(Exact):
    def parallelize(self, model: nn.Module, mesh: Any) -> None:
        pass


def train(task: type[Task], mesh: dict[str, Any] | None, folder: Path, **keys: Any) -> gang.Ended:
    """On a mesh, or by one process on the ring."""
    workers = 1
    if mesh is not None:
        workers = mesh.get("replicate", 1) * mesh.get("shard", 1) * mesh.get("tensor", 1)
        keys |= {"strategy": {"kind": "fsdp", **mesh}, "workers": workers}
    ended = trained(task, folder, Shape(workers), **keys)
    assert not ended.failures, ended.failures
    return ended


KEYS: dict[str, Any] = {"steps": 20, "params": {"learning_rate": 1e-2}}
FINE: dict[str, Any] = {"steps": 6, "clip_norm": 0.1, "accumulate": 3, "batch_size": 24, "average": {"decay": 0.9}}


QUICK = ("fsdp 2",)


@pytest.mark.parametrize(
    ("mesh", "keys"),
    [
        *(pytest.param(mesh, {}, marks=() if mesh in QUICK else pytest.mark.long) for mesh in MESHES),
        pytest.param("fsdp 2 x tp 2", FINE, marks=pytest.mark.long),
        pytest.param("replicate 2 x shard 2", FINE, marks=pytest.mark.long),
    ],
)
def test_twenty_steps_in_float64_are_those_of_one_process(mesh: str, keys: dict[str, Any], tmp_path: Path) -> None:
    alone = train(Exact, None, tmp_path / "alone", **KEYS | keys)
    sharded = train(Exact, MESHES[mesh], tmp_path / "sharded", **KEYS | keys)
    assert len(alone.losses) == keys.get("steps", 20)
    assert far(alone.losses, sharded.losses) < CLOSE
    (metric, value), *_ = alone.progress["metrics"].items()
    assert sharded.progress["metrics"][metric] == pytest.approx(value, rel=CLOSE)
    assert sharded.digest, "of all parts, and the same everywhere"


@pytest.mark.long
def test_the_same_mesh_gives_the_same_bits_again(tmp_path: Path) -> None:
    mesh = MESHES["fsdp 2 x tp 2"]
    again = [train(tasks.Momentum, {"shard": 2}, tmp_path / f"time-{time}", steps=6) for time in range(2)]
    across = [train(Exact, mesh, tmp_path / f"across-{time}", steps=6) for time in range(2)]
    assert again[0].digest == again[1].digest
    assert across[0].digest == across[1].digest


@pytest.mark.long
def test_a_job_changes_between_meshes_and_the_ring(tmp_path: Path) -> None:
    """In the middle of an epoch, with the optimizer's momentum and the statistics of batch norm."""
    keys: dict[str, Any] = {"epochs": 4, "batch_size": 12, "params": {"learning_rate": 1e-2}}
    alone = train(Exact, None, tmp_path / "alone", **keys)
    losses, folder = [], tmp_path / "changing"
    for mesh, stop_at in [("fsdp 4", 3), ("fsdp 2", 6), (None, 9), ("tp 2", 13), ("replicate 2 x shard 2", None)]:
        ended = train(Exact, None if mesh is None else MESHES[mesh], folder, stop_at=stop_at, **keys)
        assert stop_at is None or ended.progress["cursor"][0] == stop_at
        losses += ended.losses
    assert far(alone.losses, losses) < CLOSE
    assert ended.progress["tally"] == alone.progress["tally"]


@pytest.mark.parametrize(
    ("task", "words"),
    [(NotSplit, "needs NotSplit.parallelize()"), (SplitsNothing, "SplitsNothing.parallelize() splits nothing")],
)
def test_a_tensor_dimension_that_splits_nothing_is_refused(task: type[Task], words: str, tmp_path: Path) -> None:
    """All of its workers would compute the same."""
    strategy = {"kind": "fsdp", "shard": 1, "tensor": 2}
    ended = trained(task, tmp_path, Shape(2), strategy=strategy, workers=2)
    assert words in ended.failure.message
    assert "    def parallelize(self, model, mesh):" in ended.failure.message


def test_what_was_waited_for_is_not_kept(tmp_path: Path) -> None:
    """A collective holds the tensors that it was given: all weights, in each step."""

    def watch(_: int, loop: Any) -> None:
        advance = loop.strategy.advance

        def watched(*arguments: Any) -> Any:
            outcome = advance(*arguments)
            groups = {id(group.present): group.present for group in loop.replica.sharding.world._groups}
            assert sum(len(group._begun) for group in groups.values()) == 0
            return outcome

        loop.strategy.advance = watched

    train(Exact, MESHES["fsdp 2"], tmp_path, steps=3, sabotage=watch)
