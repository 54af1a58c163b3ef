"""Gangs whose gradients are compressed: close to what they are whole, and on as many workers the same bits again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bits import bit_tasks as tasks
from bits.test_ddp_bits import far, train

pytestmark = pytest.mark.usefixtures("unmeasured")


class Wide(tasks.Momentum):
    """In float64, with one matrix that has no gradient in every other step."""

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
