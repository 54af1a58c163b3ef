"""Workers killed anywhere while a training loop of one's own runs: the same bits each time."""

from collections.abc import Iterator
from typing import Any

import pytest

from command import Workplace
from trial import recovered, undisturbed_in

pytestmark = [pytest.mark.faults, pytest.mark.long, pytest.mark.usefixtures("unmeasured")]

SOURCE = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


def main(run):
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    model, optimizer, _ = run.prepare(model, optimizer, scheduler)
    inputs = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.sum(1))
    run.evaluate(data, lambda batch: {"loss": F.mse_loss(model(batch[0]).squeeze(-1), batch[1])})
    if LOADER:
        batches = run.batches(data)
    run.state["scale"] = 1.0
    for epoch in run.epochs():
        for inputs, targets in batches if LOADER else run.batches(data):
            loss = run.state["scale"] * F.mse_loss(model(inputs).squeeze(-1), targets)
            result = run.step(loss)
            if result is not None:
                run.state["scale"] *= 1 + result.loss / 100
        run.state["scale"] = run.metrics["loss"]
"""
KEYS: dict[str, Any] = {
    "task": "task.py:main",
    "batch_size": 16,
    "steps": None,
    "epochs": 6,
    "workers": 3,
    "schedule": {"per": "epoch"},
    "checkpoint": {"every": 3, "keep": 3},
}
FAULTS = {
    "each phase once": [
        "kill worker 1 at step 6 in exchange",
        "kill worker 2 at step 10 in data",
        "kill worker 0 at step 17 in apply",
    ],
    "around the end of an epoch": [
        "kill worker 0 at step 4 in evaluation",
        "kill worker 1 at step 9 in forward",
        "kill worker 2 at step 16 in apply",
    ],
    "all at once": [f"kill worker {worker} at step 14" for worker in range(3)],
}


@pytest.fixture(scope="module", params=[True, False], ids=["data before the epochs", "data inside"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    source = f"LOADER = {request.param}\n{SOURCE}"
    with undisturbed_in(tmp_path_factory.mktemp("own-loop"), source, **KEYS) as place:
        yield place


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_workers_killed_in_a_loop_of_ones_own_leave_the_bits_as_they_are(faults: list[str], place: Workplace) -> None:
    recovered(place, *faults)
