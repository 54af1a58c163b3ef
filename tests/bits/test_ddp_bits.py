"""A gang comes to the losses of the ring, and on as many workers to the same bits again."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import gang
from bits import bit_tasks as tasks
from bits.shapes import Shape, trained
from bits.test_bits import CASES, alone, quick_for
from quorate.task.task import Task
from training.test_skipping import Poisoned

pytestmark = pytest.mark.usefixtures("unmeasured")

CLOSE = 1e-9
"""Of float64, relatively. Float32 is compared as far as it goes."""


class Exact(tasks.Momentum):
    """In float64: what differs is the order of additions alone."""

    def model(self) -> nn.Module:
        normed = [nn.Unflatten(1, (2, 4)), nn.BatchNorm1d(2), nn.Flatten()]
        return nn.Sequential(nn.Linear(tasks.FEATURES, 8), *normed, nn.Tanh(), nn.Linear(8, 1)).double()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        return super().loss(model, (inputs.double(), targets.double()))


def train(task: type[Task], workers: int, folder: Path, kind: str | dict[str, Any] = "ddp", **keys: Any) -> gang.Ended:
    strategy = {"kind": kind} if isinstance(kind, str) else kind
    ended = trained(task, folder, Shape(workers), strategy=strategy, **keys)
    assert not ended.failures, ended.failures
    return ended


def far(left: list[float], right: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(a) for a, b in zip(left, right, strict=True) if a is not None)


CLIPPED: dict[str, Any] = {"clip_norm": 0.1, "accumulate": 3, "batch_size": 24, "overlap": False}


@pytest.mark.parametrize(
    "workers", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(4, marks=pytest.mark.long)]
)
@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({}, marks=pytest.mark.long),
        pytest.param(CLIPPED, marks=pytest.mark.long),
        CLIPPED | {"steps": 15},
    ],
    ids=str,
)
def test_many_steps_in_float64_are_those_of_the_ring(workers: int, keys: dict[str, Any], tmp_path: Path) -> None:
    # Buckets so small that there are several.
    keys = {"steps": 50, "bucket_mb": 0.0003, "params": {"learning_rate": 1e-2}, **keys}
    ring = train(Exact, 1, tmp_path / "ring", "ring", **keys)
    gangs = [train(Exact, workers, tmp_path / f"gang-{time}", **keys) for time in range(2)]
    assert len(ring.losses) == keys["steps"]
    assert far(ring.losses, gangs[0].losses) < CLOSE
    assert gangs[0].digest == gangs[1].digest
    if workers > 1:
        assert gangs[0].digest != ring.digest, "it is no gang that adds"


@quick_for({7, 13, 31})
def test_every_kind_of_task_has_the_losses_of_the_ring(number: int, tmp_path: Path) -> None:
    case = CASES[number]
    ended = train(case.task, 2 + number % 3, tmp_path, **case.keys)
    assert ended.digest  # of all workers
    assert far(alone(number).losses, ended.losses) < 1e-4
    for key in ("samples", "tally"):
        assert ended.progress[key] == alone(number).progress[key]


@pytest.mark.long
def test_a_job_changes_between_the_ring_and_gangs_of_any_size(tmp_path: Path) -> None:
    """In the middle of an epoch, with the optimizer's momentum and the statistics of batch norm."""
    keys: dict[str, Any] = {"epochs": 4, "batch_size": 12}
    ring = train(Exact, 1, tmp_path / "ring", "ring", **keys)
    losses, folder = [], tmp_path / "changing"
    for kind, workers, stop_at in [("ddp", 2, 3), ("ring", 3, 7), ("ddp", 4, 10), ("ddp", 1, None)]:
        ended = train(Exact, workers, folder, kind, stop_at=stop_at, **keys)
        assert stop_at is None or ended.progress["cursor"][0] == stop_at
        losses += ended.losses
    assert far(ring.losses, losses) < CLOSE
    assert ended.progress["tally"] == ring.progress["tally"]


def test_a_poisoned_step_is_left_out_by_all(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"epochs": 2, "batch_size": 10, "on_nonfinite_loss": "skip"}
    ring, ddp = (train(Poisoned, 2, tmp_path / kind, kind, **keys) for kind in ("ring", "ddp"))
    told = {"ring": ring.progress, "ddp": ddp.progress}
    assert len({json.dumps([each["cursor"], each["tally"], each["samples"]]) for each in told.values()}) == 1
    assert far(ring.losses, ddp.losses) < 1e-4


def test_float16_is_scaled_by_all_alike(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"precision": "fp16", "loss_scale": {"initial": 2**20}}
    ring, ddp = (train(tasks.Momentum, 2, tmp_path / kind, kind, **keys) for kind in ("ring", "ddp"))
    assert ddp.digest
    assert far(ring.losses, ddp.losses) < 1e-2


@pytest.mark.timeout(60)
def test_the_failure_of_one_worker_is_told_and_ends_the_wait_of_the_others(tmp_path: Path) -> None:
    def fail(position: int, loop: Any) -> None:
        if position == 1:
            loop.replica.begin_lane = lambda: 1 / 0

    ended = trained(Exact, tmp_path, Shape(3), strategy={"kind": "ddp"}, sabotage=fail)
    assert ended.failure.kind == "ZeroDivisionError"
    assert sorted(failure.kind for failure in ended.failures)[:2] == ["PeerLost", "PeerLost"]
