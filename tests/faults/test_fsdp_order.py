"""A sharded model whose blocks run in another order from some step on: all workers do the step again, and compare."""

import pytest

from command import Workplace

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("unmeasured")]

SOURCE = """
import os
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
import quorate


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)])
        self.blocks[1] = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 3))
        self.last = nn.Linear(3, 1)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, inputs):
        if self.training:
            self.count += 1
        for number, block in enumerate(self.blocks):
            if number == 1 or int(self.count) < 4 or not os.environ["WHO"].count(str(dist.get_rank())):
                inputs = torch.tanh(block(inputs))
        return self.last(inputs)


class Tiny(quorate.Task):
    def model(self):
        return Model()

    def datasets(self):
        inputs = torch.randn(32, 3, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.TensorDataset(inputs, inputs.sum(-1)), None

    def loss(self, model, batch):
        return F.mse_loss(model(batch[0]).squeeze(-1), batch[1])

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.01)
"""


@pytest.fixture
def place(workplace: Workplace) -> Workplace:
    workplace.task.write_text(SOURCE)
    workplace.write_job(workers=2, lanes=2, strategy={"kind": "fsdp", "shard": 2, "units": ["blocks.*"]})
    return workplace


@pytest.mark.long
def test_a_change_that_all_make_costs_a_generation_and_no_step(place: Workplace) -> None:
    done = place.train(WHO="01")
    assert done.code == 0, done.stderr
    kinds = [event["kind"] for event in place.events()]
    assert kinds.count("generation") == 2
    assert "rollback" not in kinds
    assert [event["step"] for event in place.events() if event["kind"] == "step"] == list(range(1, 9))


def test_a_change_that_one_makes_ends_the_job_with_both_parts_named(place: Workplace) -> None:
    done = place.train(WHO="1")
    assert done.code == 1
    assert "In step 4 workers go through different parts of the model." in done.error
    assert "worker 0: the forward pass of 'blocks.0'; worker 1: the forward pass of 'blocks.1'" in done.error
    assert [event["step"] for event in place.events() if event["kind"] == "step"] == [1, 2, 3]
