"""A schedule of the task that steps once an epoch: the same bits on any number of workers, and of one's own loop."""

from pathlib import Path
from typing import Any

import pytest
import torch

import gang
from bits import bit_tasks
from own_loop import own_loops as loops
from quorate.core.errors import TaskError
from quorate.own_loop.loop import own_loop_of
from quorate.task.task import configure
from training.recorded import on_one_and_on_three, run
from training.test_skipping import POISONED, Poisoned, batches

BY_EPOCH: dict[str, Any] = {"schedule": {"per": "epoch"}, "epochs": 3}


class Halved(bit_tasks.Momentum):
    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


class ToTheEnd(bit_tasks.Momentum):
    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        total, epoch = self.total_steps, self.steps_per_epoch
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total if step >= epoch else 1.0)


def test_a_schedule_may_ask_for_the_length_of_the_job(tmp_path: Path) -> None:
    by_epochs = on_one_and_on_three(ToTheEnd, tmp_path / "epochs", epochs=3)
    rates = list(by_epochs.fields("step", "learning_rate").values())
    assert rates == [rates[0]] * 4 + [rates[0] * (1 - step / 12) for step in range(4, 12)]
    by_steps = run(ToTheEnd, tmp_path / "steps", steps=12)
    assert by_steps.ended.digest == by_epochs.ended.digest


def test_elsewhere_the_length_is_refused_and_a_parameter_of_that_name_is_one() -> None:
    with pytest.raises(TaskError, match=r"self.total_steps is known in schedule\(\) only"):
        _ = ToTheEnd().total_steps

    class Own(ToTheEnd):
        total_steps: int

    assert configure(Own, {"total_steps": 7}, "job.yaml", 0).total_steps == 7


def test_it_steps_after_the_last_step_of_each_epoch(tmp_path: Path) -> None:
    ran = on_one_and_on_three(Halved, tmp_path, **BY_EPOCH)
    rates = list(ran.fields("step", "learning_rate").values())
    base = rates[0]
    assert rates == [base] * 4 + [base / 2] * 4 + [base / 4] * 4
    assert "log" not in {event.kind for event in ran.events}


def test_without_the_key_it_steps_after_every_update_and_says_so(tmp_path: Path) -> None:
    ran = on_one_and_on_three(Halved, tmp_path, epochs=3)
    rates = list(ran.fields("step", "learning_rate").values())
    assert rates == [rates[0] / 2**step for step in range(12)]
    (message,) = ran.fields("log", "message").values()
    assert "StepLR steps after every update, 4 times an epoch" in message and "schedule: {per: epoch}" in message


@pytest.mark.parametrize("strategy", ["parameter-server", "ddp"])
def test_other_strategies_come_to_the_same_rates(strategy: str, tmp_path: Path) -> None:
    ring = run(Halved, tmp_path / "ring", **BY_EPOCH)
    other = run(Halved, tmp_path / "other", 2, **BY_EPOCH, strategy=strategy)
    assert other.fields("step", "learning_rate") == ring.fields("step", "learning_rate")
    if strategy == "parameter-server":
        assert other.ended.digest == ring.ended.digest


@pytest.mark.parametrize(
    "stop_at",
    [
        pytest.param(3, id="before the end", marks=pytest.mark.long),
        pytest.param(4, id="at the end"),
        pytest.param(5, id="after the end", marks=pytest.mark.long),
    ],
)
def test_a_job_that_stops_near_the_end_of_an_epoch_goes_on_to_the_same_bits(stop_at: int, tmp_path: Path) -> None:
    for task in (Halved, own_loop_of(loops.noisy)):
        whole = run(task, tmp_path / f"{task.__name__}-whole", **BY_EPOCH)
        folder = tmp_path / task.__name__
        assert run(task, folder, 2, stop_at=stop_at, **BY_EPOCH).ended.ending == "interrupted"
        assert run(task, folder, 3, **BY_EPOCH).ended.digest == whole.ended.digest


def test_a_loop_of_ones_own_comes_to_the_bits_of_the_task(tmp_path: Path) -> None:
    as_task = run(loops.Noisy, tmp_path / "task", **BY_EPOCH)
    own = run(own_loop_of(loops.noisy), tmp_path / "own", 2, **BY_EPOCH)
    other = run(loops.Noisy, tmp_path / "other", **BY_EPOCH | {"schedule": {"per": "step"}})
    assert own.ended.digest == as_task.ended.digest != other.ended.digest


def test_an_epoch_whose_last_step_is_left_out_counts(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"epochs": 4, "batch_size": 10, "on_nonfinite_loss": "skip"}
    void = [step for step, batch in enumerate(batches(**keys), 1) if batch & POISONED]
    assert any(step % 5 == 0 for step in void), "otherwise it shows nothing"
    ran = on_one_and_on_three(Poisoned, tmp_path, **keys, schedule={"per": "epoch"})
    rates = ran.fields("step", "learning_rate")
    base = rates[1]
    assert [rates[5 * epoch + 1] for epoch in (1, 2, 3)] == [pytest.approx(base * 0.9**epoch) for epoch in (1, 2, 3)]


def test_the_jobs_own_kinds_count_epochs_too(tmp_path: Path) -> None:
    ran = on_one_and_on_three(
        bit_tasks.Adam, tmp_path, epochs=4, schedule={"kind": "linear", "per": "epoch", "warmup": 1}
    )
    rates = list(ran.fields("step", "learning_rate").values())
    assert rates == [rate for epoch in range(4) for rate in [rates[4 * epoch]] * 4]
    assert rates[::4] == [pytest.approx(1e-3 * factor) for factor in (1, 1, 2 / 3, 1 / 3)]


def test_nothing_to_step_is_refused(tmp_path: Path) -> None:
    spec = gang.job(bit_tasks.Momentum, **BY_EPOCH)
    failure = gang.train(bit_tasks.Momentum, spec, 1, tmp_path).failure
    assert "there is no schedule" in failure.message and "schedule: {per: epoch}" in failure.message
