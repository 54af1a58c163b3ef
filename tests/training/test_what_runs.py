"""What a job on a device says of how it computes."""

import torch
from torch import nn

import gang
from quorate.observe.screen import summary_rows
from quorate.replica.device import CPU
from quorate.replica.replica import Replica
from quorate.task.task import Task
from replica.away_device import AwayDevice


class Convolving(Task):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 4, 1))

    def datasets(self) -> list[int]:
        return [0]

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).mean()  # type: ignore[no-any-return]

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)


def test_all_that_was_chosen_is_told() -> None:
    device = AwayDevice(channels_last=True)
    replica = Replica(Convolving(), gang.job(Convolving), device)
    assert replica.what_runs() == "away, fp32, deterministic, channels last, fused SGD"
    assert replica.what_runs(is_captured=True) == "away, fp32, captured, deterministic, channels last, fused SGD"
    free = gang.job(Convolving, deterministic=False, memory={"checkpoint_activations": "2"})
    plain = Replica(Convolving(), free, AwayDevice(fuses=False))
    assert plain.what_runs() == "away, fp32, not deterministic, activations computed again"
    assert Replica(Convolving(), gang.job(Convolving), CPU).what_runs() == "cpu, fp32, deterministic"


def test_the_summary_has_it() -> None:
    assert ("computed by", "NVIDIA H200, bf16") in summary_rows({"computed_by": "NVIDIA H200, bf16"})
    assert not [label for label, _ in summary_rows({"steps": 3}) if label == "computed by"]
