"""A bit of one worker's state flips: it is found and named, and the job ends with the bits of the undisturbed one."""

import random
from typing import Any

import pytest

from command import Workplace
from quorate.training.divergence import CYCLE
from trial import chaos, told, undisturbed_job

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("unmeasured")]

TASK = """
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import quorate

CALLS = [0]


def await_checkpoint(call):
    # The save runs beside the training: a bit that flips before it is committed leaves nothing to go back to.
    CALLS[0] += 1
    runs = [] if "HURRY" in os.environ else list(Path("runs").iterdir())
    while CALLS[0] == call and not all(any(run.glob("checkpoints/step-*")) for run in runs):
        time.sleep(0.01)


class Tiny(quorate.Task):
    waits_at: int = 60

    def model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    def datasets(self):
        generator = torch.Generator().manual_seed(3)
        inputs = torch.randn(256, 8, generator=generator)
        samples = torch.utils.data.TensorDataset(inputs, torch.randint(0, 4, (256,), generator=generator))
        return samples, torch.utils.data.Subset(samples, range(32))

    def loss(self, model, batch):
        await_checkpoint(self.waits_at)
        inputs, targets = batch
        return F.cross_entropy(model(inputs), targets)

    def metrics(self, model, batch):
        inputs, targets = batch
        return {"loss": F.cross_entropy(model(inputs), targets)}

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=0.003)
"""
KEYS: dict[str, Any] = {
    "batch_size": 16,
    "steps": 90,
    "workers": 3,
    "failure_timeout": 6.0,
    "evaluate": {"every": 60},
    "checkpoint": {"every": 20, "keep": 3},
}


place = undisturbed_job(TASK, **KEYS)


longer = undisturbed_job(TASK, **(KEYS | {"steps": 200, "checkpoint": {"every": 50}, "params": {"waits_at": 110}}))
"""A job with room for a bit that flips at any step of a cycle, after the first of few checkpoints."""


def assert_found(place: Workplace, document: dict[str, Any], culprit: int) -> None:
    """It has come about, it was found in time, the worker was named, and nothing of it is left in the results."""
    ((fault,),) = [fault["firings"] for fault in document["faults"]]
    first, *_ = told(place, document, "lost")
    assert first["cause"] == "ReplicasDiffer"
    assert first["step"] - fault["step"] <= CYCLE
    assert culprit in {loss["worker"] for loss in told(place, document, "lost")}
    (back,) = told(place, document, "rollback")
    assert back["step"] <= fault["step"]
    assert document["same"]
    assert document["ledger_whole"]
    assert losses(place, document["run"]) == losses(place, document["undisturbed_run"])


def losses(place: Workplace, run: str) -> dict[int, float]:
    """The last that was told of each step."""
    events = place.events(place.folder / "runs" / run)
    return {event["step"]: event["loss"] for event in events if event["kind"] == "step"}


@pytest.mark.long
@pytest.mark.parametrize("links", ["auto", pytest.param("tcp", marks=pytest.mark.long)])
def test_the_majority_names_the_worker_and_the_bits_are_the_same(place: Workplace, links: str) -> None:
    document = chaos(place, "flip worker 1 at step 50", settings=(f"links={links}",))
    assert_found(place, document, 1)
    assert [loss["worker"] for loss in told(place, document, "lost")] == [1]


@pytest.mark.long
def test_of_two_workers_both_are_replaced(place: Workplace) -> None:
    document = chaos(place, "flip worker 0 at step 50 in exchange", settings=("workers=2",))
    assert_found(place, document, 0)
    assert sorted(loss["worker"] for loss in told(place, document, "lost")) == [0, 1]


def test_without_a_checkpoint_the_job_ends_and_says_so(place: Workplace) -> None:
    settings = ("checkpoint.every=1000",)
    document = chaos(place, "flip worker 1 at step 5", settings=settings, code=1, HURRY="1")
    assert "There is no checkpoint to go back to" in document["failure"]["message"]
    assert "worker 1 and workers 0, 2 hold different bits" in document["failure"]["message"]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(50))
def test_a_bit_at_random(longer: Workplace, seed: int) -> None:
    chance = random.Random(seed)
    worker, step = chance.randrange(3), chance.randrange(60, 201)
    document = chaos(longer, f"flip worker {worker} at step {step}")
    assert_found(longer, document, worker)
    assert [loss["worker"] for loss in told(longer, document, "lost")] == [worker]
