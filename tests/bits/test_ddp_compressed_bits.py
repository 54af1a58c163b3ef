"""Gangs whose gradients are compressed: close to what they are whole, and on as many workers the same bits again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bits import bit_tasks as tasks
from bits.test_ddp_bits import CLOSE, far, train

pytestmark = pytest.mark.usefixtures("unmeasured")

LOW_RANK = {"kind": "ddp", "compress": {"rank": 2, "start": 3}}


class Wide(tasks.Momentum):
    """In float64, with matrices that are worth compressing, and one that has no gradient in every other step."""

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(tasks.FEATURES, 24), nn.Tanh(), nn.Linear(24, 20), nn.Tanh(), nn.Linear(20, 1))
        return nn.ModuleDict({"always": model, "seldom": nn.Linear(24, 24)}).double()

    def loss(self, model: Any, batch: Any) -> Any:
        inputs, targets = batch
        layers = model["always"]
        hidden = layers[1](layers[0](inputs.double()))
        if torch.rand(()) < 0.3:  # of the lane: some have it, and some have not
            hidden = hidden + 0.1 * model["seldom"](hidden)
        return nn.functional.mse_loss(layers[2:](hidden).squeeze(-1), targets.double())


class PoisonedWide(Wide):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch)
        return loss * float("nan") if torch.rand(()) < 0.1 else loss


KEYS: dict[str, Any] = {"steps": 20, "bucket_mb": 0.002, "params": {"learning_rate": 1e-2}}


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_rounded_gradients_are_near_the_whole_ones(dtype: str, tmp_path: Path) -> None:
    whole = train(Wide, 2, tmp_path / "whole", **KEYS)
    rounded = [
        train(Wide, 2, tmp_path / f"{time}", {"kind": "ddp", "compress": {"dtype": dtype}}, **KEYS) for time in range(2)
    ]
    assert rounded[0].digest == rounded[1].digest
    assert 1e-12 < far(whole.losses, rounded[0].losses) < 3e-2


@pytest.mark.long
def test_powersgd_depends_on_the_sum_over_all_workers_alone(tmp_path: Path) -> None:
    """On any number of workers, and after whole steps at first."""
    gangs = {workers: train(Wide, workers, tmp_path / f"{workers}", LOW_RANK, **KEYS) for workers in (1, 2, 4)}
    whole = train(Wide, 2, tmp_path / "whole", **KEYS)
    again = train(Wide, 4, tmp_path / "again", LOW_RANK, **KEYS)
    assert again.digest == gangs[4].digest
    for ended in gangs.values():
        assert far(gangs[1].losses, ended.losses) < CLOSE
    # The loss of a step is known before it is applied.
    assert far(whole.losses[:4], gangs[2].losses[:4]) < CLOSE
    assert far(whole.losses, gangs[2].losses) > 1e-6


@pytest.mark.long
def test_a_resume_goes_on_with_what_was_held_back(tmp_path: Path) -> None:
    """To the same bits on as many workers; on others to the same losses, since nothing of it is lost."""
    undisturbed = train(Wide, 4, tmp_path / "undisturbed", LOW_RANK, **KEYS)
    same = tmp_path / "same"
    train(Wide, 4, same, LOW_RANK, stop_at=7, **KEYS)
    assert train(Wide, 4, same, LOW_RANK, **KEYS).digest == undisturbed.digest
    losses: list[float] = []
    for workers, stop_at in [(4, 2), (2, 7), (3, 9), (1, 13), (4, None)]:
        losses += train(Wide, workers, tmp_path / "other", LOW_RANK, stop_at=stop_at, **KEYS).losses
    assert far(undisturbed.losses, losses) < CLOSE


def test_a_model_without_a_matrix_that_is_worth_it_travels_whole(tmp_path: Path) -> None:
    compress = {"rank": 64, "start": 0}
    compressed = train(tasks.Momentum, 2, tmp_path / "compressed", {"kind": "ddp", "compress": compress})
    assert compressed.digest == train(tasks.Momentum, 2, tmp_path / "whole").digest


def test_a_step_that_is_left_out_leaves_what_was_held_back(tmp_path: Path) -> None:
    keys = KEYS | {"on_nonfinite_loss": "skip"}
    gangs = [train(PoisonedWide, workers, tmp_path / f"{workers}", LOW_RANK, **keys) for workers in (1, 2)]
    left_out = [index for index, loss in enumerate(gangs[0].losses) if loss is None]
    assert any(gangs[0].losses[index + 1] is not None for index in left_out[:-1] if index > 4)
    assert far(gangs[0].losses, gangs[1].losses) < CLOSE
