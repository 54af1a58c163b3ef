"""A worker that is alone on a device that is not the host: steps are applied before they are read, and judged in order.

Two and three workers read every step at once. So what one worker tells and ends with is held against theirs.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gang
from bits import bit_tasks as tasks
from quorate.core.errors import LeaseExpired
from quorate.task.task import Task
from quorate.training.late_loop import MOST_AHEAD
from quorate.training.strategy import StepRequest
from replica.away_device import AwayDevice
from training.recorded import on_one_and_on_three, run
from training.test_skipping import KEYS, POISONED, PoisonedPoints, batches, saved_state, skipped

pytestmark = pytest.mark.usefixtures("unmeasured")


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> AwayDevice:
    made = AwayDevice()
    monkeypatch.setattr(gang, "CPU", made)
    return made


class Logged(tasks.BatchNormAndDropout):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch)
        self.log("twice", 2 * loss.detach())
        return loss


@pytest.mark.parametrize(
    ("task", "keys"),
    [
        (tasks.Momentum, {"lanes": 1, "clip_norm": 1.0}),
        pytest.param(tasks.Adam, {"lanes": 4}, marks=pytest.mark.long),
        (Logged, {"lanes": 4, "accumulate": 2, "clip_norm": 1.0, "schedule": {"kind": "linear"}}),
        pytest.param(Logged, {"lanes": 1, "on_nonfinite_loss": "skip"}, marks=pytest.mark.long),
        pytest.param(tasks.TwoOptimizers, {"lanes": 2}, marks=pytest.mark.long),
        (Logged, {"lanes": 4, "precision": "fp16", "loss_scale": {"initial": 1, "growth_interval": 3}}),
    ],
    ids=str,
)
def test_nobody_waits_in_a_plain_step(
    task: type[Task], keys: dict[str, Any], tmp_path: Path, device: AwayDevice
) -> None:
    keys = {"evaluate": {"every": 1_000}, "checkpoint": {"every": 1_000}} | keys
    waits = []
    for steps in (12, 30):
        before = device.waits
        run(task, tmp_path / f"{steps}", steps=steps, **keys)
        waits.append(device.waits - before)
    assert waits[0] == waits[1]
    assert 1 < device.longest_lag <= MOST_AHEAD


def test_at_most_so_many_steps_are_begun_before_the_first_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = AwayDevice(delay=1_000_000)
    monkeypatch.setattr(gang, "CPU", device)
    ran = run(tasks.Momentum, tmp_path / "run", steps=30, evaluate={"every": 1_000})
    assert list(ran.fields("step", "loss")) == list(range(1, 31))
    assert device.longest_lag == MOST_AHEAD + 1


@pytest.mark.parametrize(
    ("task", "keys"),
    [
        # A (sum, count) divides the gradient; a schedule, an average and an optimizer of one's own need the host.
        (tasks.TinyTransformer, {}),
        (tasks.MultiStep, {}),
        (tasks.NoisyOptimizer, {}),
        (tasks.Momentum, {"average": {"decay": 0.9}}),
    ],
    ids=str,
)
def test_what_needs_the_host_is_read_at_once(
    task: type[Task], keys: dict[str, Any], tmp_path: Path, device: AwayDevice
) -> None:
    run(task, tmp_path / "run", steps=12, **keys)
    assert device.longest_lag <= 2  # the losses and the norms of one step


def test_evaluations_and_checkpoints_are_of_complete_steps(tmp_path: Path) -> None:
    keys = {"steps": 23, "evaluate": {"every": 5}, "checkpoint": {"every": 7, "keep": 9}}
    ran = on_one_and_on_three(Logged, tmp_path, **keys)
    assert list(ran.metrics) == [5, 10, 15, 20, 23]
    assert {7, 14, 21, 23} <= set(ran.saved_steps)


class Poisoned(tasks.BatchNormAndDropout):
    def datasets(self) -> Any:
        return PoisonedPoints(), tasks.Points(21)


class PoisonedAdam(Poisoned):
    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate)


def poisoned_steps(**keys: Any) -> list[int]:
    return [step for step, batch in enumerate(batches(**keys), 1) if batch & POISONED]


SCHEDULED: dict[str, Any] = KEYS | {"schedule": {"kind": "cosine", "warmup": 2}}


@pytest.mark.parametrize(
    "task", [pytest.param(Poisoned, marks=pytest.mark.long), PoisonedAdam], ids=lambda task: task.__name__
)
def test_poisoned_steps_are_left_out_as_if_they_had_been_read_at_once(task: type[Task], tmp_path: Path) -> None:
    ran = on_one_and_on_three(task, tmp_path, **SCHEDULED)
    assert list(skipped(ran)) == poisoned_steps(epochs=2, batch_size=10)


def test_nothing_of_a_skipped_step_reaches_what_is_saved(tmp_path: Path) -> None:
    step = poisoned_steps(epochs=2, batch_size=10)[-1]
    lone, two = (run(PoisonedAdam, tmp_path / str(n), n, stop_at=step, **SCHEDULED) for n in (1, 2))
    assert lone.ended.tensors == two.ended.tensors
    assert saved_state(lone) == saved_state(two)
    assert (
        run(PoisonedAdam, tmp_path / "1", **SCHEDULED).ended.digest
        == run(PoisonedAdam, tmp_path / "whole", **SCHEDULED).ended.digest
    )


def test_a_poisoned_step_that_ends_the_job_ends_it_before_anything_after_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gang, "CPU", AwayDevice(delay=5))
    keys: dict[str, Any] = {"epochs": 2, "batch_size": 10, "lanes": 1, "checkpoint": {"every": 1_000}, "seed": 3}
    step = next(s for s in poisoned_steps(**{k: v for k, v in keys.items() if k != "checkpoint"}) if s > 1)
    assert step < 8  # there are steps after it, which have been begun
    ran = run(Poisoned, tmp_path / "run", **keys)
    assert f"at step {step} in lane 0" in ran.ended.failure.message
    assert (ran.ended.failure.kind, ran.ended.failure.step) == ("LossError", step)
    assert list(ran.fields("step", "loss")) == list(range(1, step))
    assert ran.saved_steps == []


class SpoiltAfterPoison(tasks.Regression):
    """A step whose samples are poisoned, and then one whose loss is finite and its gradient is not."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        number = round(float(batch[1][0]))
        loss = super().loss(model, batch)
        if number == 4:
            return loss * math.nan
        return loss + 0.0 * torch.sqrt(0.0 * model(batch[0]).sum()) if number == 5 else loss

    def datasets(self) -> Any:
        points = tasks.Points(40)
        points.targets = (torch.arange(40) // 4 + 1).float()
        return points

    def order(self, epoch: int, generator: Any) -> Any:
        return range(40)


def test_weights_that_are_spoilt_later_do_not_blame_a_step_that_may_be_skipped(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"steps": 9, "batch_size": 4, "lanes": 2, "on_nonfinite_loss": "skip"}
    lone, two = (run(SpoiltAfterPoison, tmp_path / str(n), n, **keys) for n in (1, 2))
    assert "at step 6" in two.ended.failure.message and "the weights are no longer finite" in two.ended.failure.message
    assert lone.ended.failure.message == two.ended.failure.message
    assert lone.told == two.told
    assert list(skipped(lone)) == [4]


class Stumbles(tasks.Momentum):
    """Raises in the middle of a job."""

    at: int = 9

    def loss(self, model: nn.Module, batch: Any) -> Any:
        if self.at and float(batch[1][0]) == self.at:
            raise ValueError("stumbled")
        return super().loss(model, batch)

    def datasets(self) -> Any:
        points = tasks.Points(60)
        points.targets = (torch.arange(60) // 4 + 1).float()
        return points

    def order(self, epoch: int, generator: Any) -> Any:
        return range(60)


def test_what_was_done_before_user_code_failed_is_told_and_can_be_gone_on_from(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"steps": 15, "batch_size": 4, "lanes": 2, "checkpoint": {"every": 6}}
    ran = run(Stumbles, tmp_path / "run", **keys)
    failure = ran.ended.failure
    assert ("stumbled" in failure.message, failure.step, failure.lane) == (True, 9, 0)
    assert list(ran.fields("step", "loss")) == list(range(1, 9))
    assert ran.saved_steps == [6]
    keys |= {"params": {"at": 0}}
    assert (
        run(Stumbles, tmp_path / "run", **keys).ended.digest == run(Stumbles, tmp_path / "whole", **keys).ended.digest
    )


class Unruled(tasks.UnruledBuffer):
    """Writes into its buffer: one that is assigned is read at once."""

    def model(self) -> nn.Module:
        return _WritesLate()


class _WritesLate(nn.Module):
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(tasks.FEATURES, 1)
        self.register_buffer("table", torch.zeros(tasks.FEATURES))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.get_buffer("steps").add_(1)
            self.table.add_(inputs.mean(0) * (self.get_buffer("steps") == 5))
        out: torch.Tensor = self.linear(inputs)
        return out


def test_a_buffer_that_lanes_do_not_agree_on_is_refused_with_its_step(tmp_path: Path) -> None:
    lone, two = (run(Unruled, tmp_path / str(n), n, steps=12) for n in (1, 2))
    assert lone.ended.failure.message == two.ended.failure.message
    assert "Buffer 'table' was changed differently by the lanes of step 5" in lone.ended.failure.message
    assert list(lone.fields("step", "loss")) == [1, 2, 3, 4]


def leaves_and_loses(check: Callable[[Any], None]) -> Callable[[int, Any], None]:
    """The generation ends at a boundary, then by a lease that is lost; and goes on each time."""

    def sabotage(_: int, loop: Any) -> None:
        run_on, held, is_lost = loop.run, loop.check_lease, [False]

        def check_lease() -> None:
            held()
            if is_lost[0] and loop.activity.step == 11:
                raise LeaseExpired("the lease is over")

        def disturbed() -> Any:
            loop.requested = lambda: StepRequest(leave=loop.activity.step == 6)
            assert run_on() is None
            check(loop)
            assert loop.progress.cursor.step == 6
            is_lost[0] = True
            with pytest.raises(LeaseExpired):
                run_on()
            check(loop)
            assert loop.progress.cursor.step == 10
            is_lost[0] = False
            return run_on()

        loop.run, loop.check_lease = disturbed, check_lease

    return sabotage


def test_the_model_is_never_ahead_when_a_generation_ends(tmp_path: Path) -> None:
    """Whoever leaves the loop hands on a state, and the progress that belongs to it."""

    def check(loop: Any) -> None:
        steps = {int(values["step"]) for values in loop.replica.optimizers.by_name[""].state.values()}
        assert steps == {loop.progress.cursor.step}
        assert not loop._begun

    for name in ("whole", "disturbed"):
        (tmp_path / name).mkdir()
    spec = gang.job(tasks.Adam, steps=15)
    whole = gang.train(tasks.Adam, spec, 1, tmp_path / "whole")
    disturbed = gang.train(tasks.Adam, spec, 1, tmp_path / "disturbed", sabotage=leaves_and_loses(check))
    assert disturbed.digest == whole.digest
    assert disturbed.losses == whole.losses
