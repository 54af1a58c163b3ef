"""A job that reads streams, killed in the middle of an epoch and resumed on another number of workers."""

import json
import os
import signal
from typing import Any

import pytest

from command import Workplace

TASK = """
import os, random, time
import torch, quorate
from torch import nn

class Streamed(quorate.Task):
    def model(self):
        return nn.Linear(3, 1)

    def datasets(self):
        return quorate.Stream(self.read, samples=64)

    def read(self, epoch, shard, shards):
        for number in range(shard, 64, shards):
            yield torch.full((3,), epoch + number / 64) + torch.rand(3) + random.random()

    def loss(self, model, batch):
        time.sleep(float(os.environ.get("PAUSE", 0)))
        return (model(batch) ** 2).mean()

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.01)
"""


@pytest.mark.faults
@pytest.mark.parametrize("loaders", [pytest.param(0, marks=pytest.mark.long), 2])
def test_killed_and_resumed_in_the_middle_of_an_epoch(workplace: Workplace, loaders: int) -> None:
    workplace.task.write_text(TASK)
    keys: dict[str, Any] = {"loader_workers": loaders, "steps": None, "epochs": 3, "checkpoint": {"every": 1}}
    workplace.write_job(task="task.py:Streamed", **keys)
    assert workplace.train("--workers", "1").code == 0
    undisturbed = workplace.result()["weights_digest"]
    running = workplace.start("train", "job.yaml", "--workers", "3", PAUSE="0.1")
    running.await_event("checkpoint", 10)
    os.killpg(running.process.pid, signal.SIGKILL)
    running.done()
    done = workplace.run("resume", "last", "--workers", "2", "--json")
    assert done.code == 0, done.stderr
    assert 8 < done.document["from_step"] < 24
    assert done.document["weights_digest"] == undisturbed
    ledger = json.loads(workplace.run("show", "last", "--ledger", "--json").stdout)
    assert [epoch["status"] for epoch in ledger["ledger"]["epochs"]] == ["whole"] * 3, ledger


def test_old_checkpoints_of_a_job_that_reads_streams_are_removed(workplace: Workplace) -> None:
    workplace.task.write_text(TASK)
    workplace.write_job(task="task.py:Streamed", steps=6, checkpoint={"every": 1, "keep": 2}, audit={"every": 200})
    assert workplace.train("--workers", "1").code == 0
    assert len(workplace.checkpoints()) == 2
