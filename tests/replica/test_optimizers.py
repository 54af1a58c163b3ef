"""Optimizers and schedulers of a task: two of them, every kind of schedule, their state, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

import gang
from bits.bit_tasks import Regression
from checkpoint.whole_save import save_whole
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import RunError, TaskError, UserCodeError
from quorate.data.sampler import LaneSampler
from quorate.replica.optimizer_state import load_state
from quorate.replica.optimizers import SOLE, Optimizers
from quorate.replica.replica import Replica
from quorate.spec.job import ScheduleSpec
from quorate.task.task import Task

Build = Callable[[nn.Module], Any]


class Made(Task):
    def __init__(self, build: Build, schedule: Callable[[Optimizer], Any] = lambda optimizer: None) -> None:
        self.build = build
        self.make_schedule = schedule

    def optimizer(self, model: nn.Module) -> Any:
        return self.build(model)

    def schedule(self, optimizer: Optimizer) -> Any:
        return self.make_schedule(optimizer)


SAMPLER = LaneSampler(gang.job(Regression, lanes=1, batch_size=10, steps=6), 20, lambda _epoch, _generator: None)
"""Of a job of 6 steps, two of which are an epoch."""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})


def sgd(built: nn.Module) -> Optimizer:
    return SGD(built.parameters(), lr=0.5, momentum=0.9)


def optimizers(
    build: Build = sgd, schedule: Any = lambda optimizer: None, spec: ScheduleSpec | None = None
) -> Optimizers:
    job = gang.job(Regression, lanes=1, batch_size=10, steps=6).model_copy(update={"schedule": spec})
    return Optimizers(Made(build, schedule), model(), job)


def run(given: Optimizers, steps: int) -> list[float]:
    """The learning rate after each of so many steps with a gradient of ones."""
    rates = []
    for step in range(1, steps + 1):
        for name in given.by_name:
            for parameter in given.parameters(name):
                parameter.grad = torch.ones_like(parameter)
        given.update()
        given.advance_schedules(step, SAMPLER)
        rates.append(next(iter(given.learning_rates.values())))
    return rates


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "StepLR": lambda o: StepLR(o, 2, 0.5),
    "OneCycleLR": lambda o: OneCycleLR(o, max_lr=1.0, total_steps=12),
    "LambdaLR": lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
    "CyclicLR": lambda o: CyclicLR(o, base_lr=0.1, max_lr=0.5, step_size_up=3),
    "WarmRestarts": lambda o: CosineAnnealingWarmRestarts(o, T_0=3),
    "SequentialLR": lambda o: SequentialLR(o, [LambdaLR(o, lambda step: 0.1), StepLR(o, 2, 0.5)], [3]),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_tasks_schedule_moves_the_rate_as_in_plain_pytorch(kind: str) -> None:
    plain = sgd(model())
    scheduler = SCHEDULES[kind](plain)
    expected = []
    for _ in range(6):
        plain.step()
        scheduler.step()
        expected.append(plain.param_groups[0]["lr"])
    assert run(optimizers(schedule=SCHEDULES[kind]), 6) == expected
    assert len(set(expected)) > 1


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_goes_on_where_its_checkpoint_stopped(kind: str, tmp_path: Path) -> None:
    first = optimizers(schedule=SCHEDULES[kind])
    run(first, 3)
    second = optimizers(schedule=SCHEDULES[kind])
    load_state(second, through_a_checkpoint(first.state(), tmp_path))
    assert second.learning_rates == first.learning_rates
    assert run(second, 5) == run(first, 5)


def through_a_checkpoint(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    checkpoints = CheckpointFolder(folder)
    save_whole(checkpoints, state, step=1)
    newest = checkpoints.search().newest
    assert newest is not None
    return checkpoints.load(newest).state


def test_a_plateau_schedule_reacts_to_evaluations_only_and_remembers(tmp_path: Path) -> None:
    def plateau(optimizer: Optimizer) -> Any:
        return ReduceLROnPlateau(optimizer, factor=0.1, patience=1)

    given = optimizers(schedule=plateau)
    assert given.reacts
    assert run(given, 4) == [0.5] * 4
    given.react(1.0)
    given.react(1.0)
    again = optimizers(schedule=plateau)
    load_state(again, through_a_checkpoint(given.state(), tmp_path))
    assert again.learning_rates == {SOLE: 0.5}
    again.react(1.0)
    assert again.learning_rates[SOLE] == pytest.approx(0.05)


def changed_sgd(built: nn.Module) -> Optimizer:
    return SGD(built.parameters(), lr=0.25, momentum=0.9, weight_decay=0.1)


def test_a_branch_has_the_settings_that_it_is_given_and_the_state_of_the_checkpoint(tmp_path: Path) -> None:
    first = optimizers()
    run(first, 2)
    branch = optimizers(changed_sgd)
    load_state(branch, through_a_checkpoint(first.state(), tmp_path))
    (group,) = branch.by_name[SOLE].param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.25, 0.9, 0.1)
    momenta = [o.by_name[SOLE].state[o.parameters(SOLE)[0]]["momentum_buffer"] for o in (first, branch)]
    assert torch.equal(*momenta)


@pytest.mark.parametrize("kind", ["StepLR", "LambdaLR", "WarmRestarts", "SequentialLR"])
def test_a_branch_with_another_rate_follows_the_schedule_from_where_it_was(kind: str, tmp_path: Path) -> None:
    first = optimizers(schedule=SCHEDULES[kind])
    run(first, 4)
    branch = optimizers(changed_sgd, SCHEDULES[kind])
    load_state(branch, through_a_checkpoint(first.state(), tmp_path))
    undisturbed = run(optimizers(changed_sgd, SCHEDULES[kind]), 9)
    assert branch.learning_rates[SOLE] == pytest.approx(undisturbed[3])
    assert run(branch, 5) == pytest.approx(undisturbed[4:])


def test_a_branch_may_change_its_schedule_have_one_or_none(tmp_path: Path) -> None:
    first = optimizers(schedule=SCHEDULES["StepLR"])
    run(first, 3)
    state = through_a_checkpoint(first.state(), tmp_path / "scheduled")
    flatter = optimizers(schedule=lambda o: StepLR(o, 2, 0.9))
    load_state(flatter, state)
    assert run(flatter, 1) == [pytest.approx(0.25 * 0.9)]
    without = optimizers()
    load_state(without, state)
    assert run(without, 2) == [0.5, 0.5]
    plain = optimizers()
    run(plain, 1)
    begun = optimizers(schedule=SCHEDULES["StepLR"])
    load_state(begun, through_a_checkpoint(plain.state(), tmp_path / "plain"))
    assert run(begun, 3) == [0.5, 0.25, 0.25]


def test_the_job_files_schedule_multiplies_each_groups_own_rate() -> None:
    def two_groups(built: nn.Module) -> Optimizer:
        assert isinstance(built, nn.ModuleDict)
        groups: list[dict[str, Any]] = [
            {"params": built["a"].parameters()},
            {"params": built["b"].parameters(), "lr": 4.0},
        ]
        return SGD(groups, lr=1.0)

    given = optimizers(two_groups, spec=ScheduleSpec(kind="linear", warmup=2))
    rates = []
    for step in range(1, 7):
        given.prepare(step, SAMPLER)
        rates.append([group["lr"] for group in given.by_name[SOLE].param_groups])
    assert rates[:3] == [[0.5, 2.0], [1.0, 4.0], [1.0, 4.0]]
    assert rates[3:] == [[0.75, 3.0], [0.5, 2.0], [0.25, 1.0]]
    assert not given.reacts


def named(built: nn.Module) -> Any:
    assert isinstance(built, nn.ModuleDict)
    return {"one": SGD(built["a"].parameters(), lr=0.1), "two": Adam(built["b"].parameters(), lr=0.2)}


def test_two_named_optimizers_have_their_own_parameters_rates_and_schedules() -> None:
    given = optimizers(named, schedule=lambda o: StepLR(o, 1, 0.5) if isinstance(o, Adam) else None)
    assert given.learning_rates == {"one": 0.1, "two": 0.2}
    assert [tuple(p.shape) for p in given.parameters("one")] == [(2, 2), (2,)]
    assert not {id(p) for p in given.parameters("one")} & {id(p) for p in given.parameters("two")}
    run(given, 1)
    assert given.learning_rates == {"one": 0.1, "two": 0.1}
    assert set(given.state()["optimizers"]) == {"one", "two"}
    assert set(given.state()["schedulers"]) == {"two"}


def test_frozen_parameters_are_no_inputs_of_a_backward_pass() -> None:
    def partly(built: nn.Module) -> Any:
        assert isinstance(built, nn.ModuleDict)
        built["a"].bias.requires_grad_(False)
        return {"one": SGD(built["a"].parameters(), lr=0.1)}

    assert [tuple(p.shape) for p in optimizers(partly).parameters("one")] == [(2, 2)]


def test_parameters_that_no_optimizer_has_are_named() -> None:
    class Part(Regression):
        def optimizer(self, model: nn.Module) -> Any:
            return sgd(next(model.children()))

    job = gang.job(Regression, lanes=1, batch_size=10, steps=6)
    names = [name for name, _ in Replica(Regression(), job).trainable]
    notice = Replica(Part(), job).notice_of_left_out() or ""
    assert f"stay as they are: {', '.join(names[2:])}." in notice
    assert Replica(Regression(), job).notice_of_left_out() is None


def test_scheduling_twice_is_refused() -> None:
    with pytest.raises(TaskError, match=r"scheduled twice: by the job file \(schedule: cosine\)"):
        optimizers(schedule=lambda o: StepLR(o, 1), spec=ScheduleSpec(kind="cosine"))


def shared(built: nn.Module) -> Any:
    assert isinstance(built, nn.ModuleDict)
    return {"one": SGD(built.parameters(), lr=0.1), "two": SGD(built["b"].parameters(), lr=0.1)}


REFUSED: dict[str, tuple[Build, type[Exception], str]] = {
    "closure": (lambda m: torch.optim.LBFGS(m.parameters()), TaskError, "LBFGS.*closure.*AdamW"),
    "foreign": (lambda m: SGD([nn.Parameter(torch.ones(1))], lr=1), TaskError, "not a parameter of the model"),
    "twice": (shared, TaskError, r"'b\.weight' belongs to two optimizers, 'one' and 'two'"),
    "no optimizer": (lambda m: "SGD", TaskError, 'returned the text "SGD"; it must return a torch optimizer'),
    "nothing": (lambda m: None, TaskError, r"returned nothing \(None\).*Is a `return` missing"),
    "a class": (lambda m: SGD, TaskError, r"returned the class SGD.*Is `\(\)` missing after SGD"),
    "a named nothing": (lambda m: {"one": None}, TaskError, r"returned nothing \(None\) under 'one'"),
    "no optimizers": (lambda m: {}, TaskError, "empty dict"),
    "raises": (lambda m: SGD([], lr=1), UserCodeError, r"empty parameter list \(in optimizer\(\)\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_optimizer_may_not_give(case: str) -> None:
    build, error, text = REFUSED[case]
    with pytest.raises(error, match=text):
        optimizers(build)


def test_what_schedule_may_not_give() -> None:
    with pytest.raises(TaskError, match=r"schedule\(\) returned the float 0.5; it must return a scheduler"):
        optimizers(schedule=lambda o: 0.5)


def test_an_exception_in_schedule_or_step_is_the_users() -> None:
    with pytest.raises(UserCodeError, match=r"ZeroDivisionError.*in schedule\(\)") as raised:
        optimizers(schedule=lambda o: 1 / 0)
    assert raised.value.exit_code == 2, "nothing was trained yet"
    late = optimizers(schedule=lambda o: LambdaLR(o, lambda step: 1 / (1 - step) if step else 1.0))
    with pytest.raises(UserCodeError, match=r"in optimizer\.step\(\)") as raised:
        run(late, 1)
    assert raised.value.exit_code == 1


def test_a_state_of_another_set_of_optimizers_is_refused() -> None:
    text = "saved with a single optimizer, and the task now gives the optimizers 'one', 'two'"
    with pytest.raises(RunError, match=text):
        load_state(optimizers(named), optimizers().state())
