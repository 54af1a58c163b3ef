"""Batch norm with the statistics of all workers: what one process computes with the whole batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gang
from bits import bit_tasks as tasks
from bits.shapes import Shape, trained
from bits.test_ddp_bits import CLOSE, far, train

pytestmark = [pytest.mark.usefixtures("unmeasured"), pytest.mark.timeout(120)]

SYNCED = {"kind": "ddp", "sync_batch_norm": True}


class Normed(tasks.Momentum):
    """Batch norms of one and of two dimensions, with and without weights, and one that averages all batches."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(tasks.FEATURES, 8),
            nn.BatchNorm1d(8),
            nn.Tanh(),
            nn.Unflatten(1, (2, 2, 2)),
            nn.BatchNorm2d(2, affine=False, momentum=None),
            nn.Flatten(),
            nn.Linear(8, 8),
            nn.BatchNorm1d(8, track_running_stats=False),
            nn.Linear(8, 1),
        ).double()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        return super().loss(model, (inputs.double(), targets.double()))


class Wandering(Normed):
    """Which batch norms there are in a pass depends on the lane."""

    def model(self) -> nn.Module:
        return nn.ModuleList([nn.Linear(tasks.FEATURES, 1), nn.BatchNorm1d(1), nn.BatchNorm1d(1)]).double()

    def loss(self, model: Any, batch: Any) -> Any:
        inputs, targets = batch
        which = 1 + int(torch.rand(()) < 0.5)
        return nn.functional.mse_loss(model[which](model[0](inputs.double())).squeeze(-1), targets.double())


KEYS: dict[str, Any] = {"steps": 20, "batch_size": 22, "bucket_mb": 0.0003, "params": {"learning_rate": 1e-2}}


def synced(workers: int, folder: Path, **keys: Any) -> gang.Ended:
    keys = KEYS | {"workers": workers, "min_workers": workers, **keys}
    ended = trained(Normed, folder, Shape(workers), strategy=SYNCED, **keys)
    assert not ended.failures, ended.failures
    return ended


@pytest.mark.long
def test_workers_with_a_lane_each_have_the_statistics_of_the_whole_batch(tmp_path: Path) -> None:
    """The batch does not divide: some have a sample more."""
    whole = train(Normed, 1, tmp_path / "whole", "ring", **KEYS, lanes=1)
    apart = train(Normed, 4, tmp_path / "apart", **KEYS, lanes=4)
    assert far(whole.losses, apart.losses) > 1e-3, "it would make no difference"
    gangs = [synced(4, tmp_path / f"{time}", lanes=4) for time in range(2)]
    assert far(whole.losses, gangs[0].losses) < CLOSE
    assert gangs[0].digest == gangs[1].digest


def test_a_checkpoint_is_that_of_any_other_strategy(tmp_path: Path) -> None:
    """With several lanes on each worker, and after passes in which the statistics were those of all."""
    whole = train(Normed, 1, tmp_path / "whole", "ring", **KEYS, lanes=1)
    folder = tmp_path / "changing"
    first = synced(2, folder, lanes=2, stop_at=8)
    rest = train(Normed, 1, folder, "ring", **KEYS, lanes=1)
    assert far(whole.losses, [*first.losses, *rest.losses]) < CLOSE
    assert rest.tensors.keys() == whole.tensors.keys()
    assert synced(2, tmp_path / "more", lanes=4, batch_size=24).digest


def test_layers_that_differ_between_workers_are_told(tmp_path: Path) -> None:
    keys = KEYS | {"lanes": 2, "workers": 2, "min_workers": 2}
    ended = trained(Wandering, tmp_path, Shape(2), strategy=SYNCED, **keys)
    assert ended.failure.kind == "UnsupportedModelError"
    assert "others are at another batch norm" in ended.failure.message


def test_those_who_are_left_of_a_job_that_stops_can_do_a_step_and_save(tmp_path: Path) -> None:
    """Their lanes do not come out even: each normalizes by its own samples, and nobody waits for a pass in vain."""
    keys = KEYS | {"lanes": 4, "workers": 4, "min_workers": 4}
    ended = trained(Normed, tmp_path, Shape(3), strategy=SYNCED, stop_at=1, **keys)
    assert (ended.ending, len(ended.losses)) == ("interrupted", 1), ended.failures
    assert "the 3 workers that are left share 4 lanes (2, 1, 1)" in ended.log
