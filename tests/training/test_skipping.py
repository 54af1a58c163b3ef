"""Steps whose loss is not finite: the job ends and names the samples, or skips them, on any number of workers."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gang
from bits.bit_tasks import BatchNormAndDropout, Points, Regression
from quorate.checkpoint.store import CheckpointFolder
from quorate.data.ledger import Tally, total
from quorate.data.sampler import LaneSampler
from training.recorded import Run, on_one_and_on_three, run

POISONED = {40, 41, 42}
KEYS: dict[str, Any] = {"epochs": 2, "batch_size": 10, "on_nonfinite_loss": "skip"}


class PoisonedPoints(Points):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, target = super().__getitem__(index)
        return (inputs * math.nan if index in POISONED else inputs), target


class Poisoned(BatchNormAndDropout):
    """A poisoned sample spoils its loss, its gradients and its running statistics; the rate follows the updates."""

    def datasets(self) -> Any:
        return PoisonedPoints(), Points(21)

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)


class PoisonedLone(Regression):
    def datasets(self) -> Any:
        return PoisonedPoints(), Points(21)


class Exploding(Regression):
    """A finite loss whose gradient is not: the weights are spoilt by an update, and every loss from then on."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return Regression.loss(self, model, batch) + 0.0 * torch.sqrt(0.0 * model(batch[0]).sum())


def batches(lanes: int = 4, **keys: Any) -> list[set[int]]:
    sampler = LaneSampler(gang.job(Regression, lanes=lanes, **keys), 50, lambda _epoch, _generator: None)
    return [set(sampler.batch(step).tolist()) for step in range(1, sampler.total_steps + 1)]


def saved_state(ran: Run) -> str:
    """Everything in the last checkpoint but how far it is: weights, buffers, optimizer and schedule."""
    folder = CheckpointFolder(ran.folder / "checkpoints")
    newest = folder.search().newest
    assert newest is not None
    return repr(folder.load(newest).state["replica"])


def skipped(ran: Run) -> dict[int, dict[str, Any]]:
    told = ran.fields("step", "skipped")
    return {step: entry for step, entry in told.items() if step is not None and entry is not None}


@pytest.mark.parametrize(
    "keys",
    [pytest.param({}, marks=pytest.mark.long), {"links": "tcp", "bucket_mb": 0.0001}, {"accumulate": 2}],
    ids=str,
)
def test_poisoned_steps_are_left_out_alike_on_any_number_of_workers(keys: dict[str, Any], tmp_path: Path) -> None:
    ran = on_one_and_on_three(Poisoned, tmp_path, **KEYS | keys)
    two = run(Poisoned, tmp_path / "two", 2, **KEYS | keys)
    assert two.ended.digest == ran.ended.digest
    assert json.dumps(two.told) == json.dumps(ran.told)
    found = skipped(ran)
    expected = [step for step, batch in enumerate(batches(epochs=2, batch_size=10), 1) if batch & POISONED]
    assert list(found) == expected
    for epoch in (0, 1):
        named = [index for step, entry in found.items() if (step - 1) // 5 == epoch for index in entry["samples"]]
        assert set(named) >= POISONED
        assert len(named) < 10 * len(found)  # only those of the lanes concerned
    losses = ran.fields("step", "loss")
    assert [step for step, loss in losses.items() if loss is None] == expected
    assert all(math.isfinite(loss) for loss in losses.values() if loss is not None)
    # Everything that was read is told, and only what was used is counted.
    tallies = total(Tally.from_hex(text) for text in ran.fields("step", "ledger").values())
    assert tallies == total(Tally.of_order(epoch, range(50)) for epoch in (0, 1))
    assert ran.ended.progress["samples"] == 10 * (10 - len(expected))


def test_nothing_of_a_skipped_step_reaches_the_state(tmp_path: Path) -> None:
    steps = [step for step, batch in enumerate(batches(epochs=2, batch_size=10), 1) if batch & POISONED]
    step = next(step for step in steps if step - 1 not in {0, *steps})
    before = run(Poisoned, tmp_path / "before", 2, stop_at=step - 1, **KEYS)
    after = run(Poisoned, tmp_path / "after", 2, stop_at=step, **KEYS)
    assert list(skipped(after)) == [*skipped(before), step]
    assert after.ended.tensors == before.ended.tensors
    assert saved_state(after) == saved_state(before)


@pytest.mark.long
def test_a_job_stopped_after_a_skipped_step_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    undisturbed = run(Poisoned, tmp_path / "undisturbed", 1, **KEYS)
    for step in skipped(undisturbed):
        folder = tmp_path / f"stopped-{step}"
        run(Poisoned, folder, 2, stop_at=step, **KEYS)
        assert run(Poisoned, folder, 3, **KEYS).ended.digest == undisturbed.ended.digest


def test_a_job_of_one_lane_skips_too(tmp_path: Path) -> None:
    ran = run(PoisonedLone, tmp_path / "run", lanes=1, **KEYS)
    assert len(ran.ended.digest) == 64
    assert [set(entry["samples"]) & POISONED for entry in skipped(ran).values()]
    assert all(set(entry["samples"]) & POISONED and entry["lanes"] == [0] for entry in skipped(ran).values())


@pytest.mark.parametrize("workers", [1, 3])
def test_by_default_the_job_ends_and_names_the_samples(workers: int, tmp_path: Path) -> None:
    failures = run(Poisoned, tmp_path / "run", workers, **KEYS | {"on_nonfinite_loss": "fail"}).ended.failures
    assert len(failures) == workers
    assert len({failure.message for failure in failures}) == 1
    (failure, *_) = failures
    assert failure.kind == "LossError"
    assert set(failure.samples) & POISONED
    assert f"which has read samples {failure.samples[0]}, " in failure.message
    assert "on_nonfinite_loss: skip" in failure.message


@pytest.mark.parametrize("workers", [1, 3])
def test_weights_that_are_spoilt_are_not_skipped_to_the_end(workers: int, tmp_path: Path) -> None:
    failure = run(Exploding, tmp_path / "run", workers, on_nonfinite_loss="skip").ended.failure
    assert failure.kind == "LossError"
    assert "at step 2" in failure.message
    assert "the weights are no longer finite" in failure.message
