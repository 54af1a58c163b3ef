"""What is compiled for training is computed as it is written in evaluation."""

from pathlib import Path
from typing import Any

import pytest
import torch

import gang
from bits import bit_tasks as tasks
from quorate.replica.device import CPU, Device, Model
from training.recorded import run

pytestmark = pytest.mark.usefixtures("unmeasured")


class Compiling(Device):
    """Its compiled models do not survive evaluation."""

    compiles = True

    def place(self, model: Model) -> Model:
        def call(*arguments: Any) -> Any:
            assert torch.is_grad_enabled(), "compiled in evaluation"
            with CPU.as_written(model):
                return model(*arguments)

        model._compiled_call_impl = call
        return model


def test_nothing_is_compiled_for_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang, "CPU", Compiling())
    ran = run(tasks.Momentum, tmp_path / "run", steps=4, lanes=1, evaluate={"every": 2})
    assert ran.ended.failures == []
    assert set(ran.fields("evaluation", "metrics")) == {2, 4}
