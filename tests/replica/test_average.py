"""The average of the parameters: evaluated in their place, taken up from a checkpoint, and what a step may not keep."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import gang
from bits import bit_tasks as tasks
from quorate.checkpoint.store import CheckpointFolder
from quorate.replica.device import digests, same_bits
from quorate.replica.replica import Replica, check_repeatable
from quorate.task.task import configure

AVERAGE: dict[str, Any] = {"average": {"decay": 0.5}}


def replica_of(**keys: Any) -> Replica:
    spec = gang.job(tasks.Adam, **keys)
    return Replica(configure(tasks.Adam, spec.params, "test", spec.seed), spec)


def stepped(replica: Replica, step: int) -> Replica:
    """Everything that a step changes, alike in every replica."""
    generator = torch.Generator().manual_seed(step)
    for _, parameter in replica.parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    replica.optimizers.update()
    if replica.average is not None:
        replica.average.update()
    return replica


def test_it_is_part_of_the_state_and_of_the_digest_only_where_the_job_keeps_it() -> None:
    plain, averaging = stepped(replica_of(), 1), stepped(replica_of(**AVERAGE), 1)
    names = [name for name, _ in plain.parameters]
    assert averaging.state_tensors().keys() - plain.state_tensors().keys() == {f"{name} (averaged)" for name in names}
    assert plain.weights_digest() != averaging.weights_digest()
    assert digests(plain.weights()) == digests(averaging.weights())
    assert plain.layout() == averaging.layout()
    check_repeatable(tasks.Adam(), averaging.spec, replica_of(**AVERAGE))


def test_it_is_taken_up_from_a_state_and_begins_with_the_weights_of_one_that_has_none() -> None:
    one = stepped(replica_of(**AVERAGE), 1)
    other = replica_of(**AVERAGE)
    other.load(copy.deepcopy(one.state()))
    assert stepped(other, 2).weights_digest() == stepped(one, 2).weights_digest()
    branch = replica_of(**AVERAGE)
    branch.load(stepped(replica_of(), 1).state())
    assert branch.average is not None
    for (_, parameter), (_, average) in zip(branch.parameters, branch.average.tensors(), strict=True):
        assert same_bits(parameter, average)
    replica_of().load(one.state())  # a branch that keeps none


def test_in_place_it_is_what_the_model_computes_with_and_leaves_no_trace() -> None:
    replica = stepped(replica_of(**AVERAGE), 1)
    average = replica.average
    assert average is not None
    before, kept = digests(replica.tensors()), {name: value.clone() for name, value in average.tensors()}
    with pytest.raises(KeyError), average.in_place():
        assert all(same_bits(p, kept[f"{name} (averaged)"]) for name, p in replica.parameters)
        raise KeyError
    assert digests(replica.tensors()) == before
    average.take_over()
    assert all(same_bits(p, kept[f"{name} (averaged)"]) for name, p in replica.parameters)


def test_a_type_that_cannot_be_blended_is_kept_apart() -> None:
    class Mixed(tasks.Regression):
        def model(self) -> nn.Module:
            model = super().model().double()
            model.register_parameter("number", nn.Parameter(torch.tensor([3]), requires_grad=False))
            model.register_parameter("short", nn.Parameter(torch.ones(3, dtype=torch.bfloat16)))
            return model

    replica = Replica(Mixed(), gang.job(tasks.Regression, **AVERAGE))
    assert replica.average is not None
    replica.average.update()
    assert {name: value.dtype for name, value in replica.average.tensors()}["number (averaged)"] is torch.int64


class Outside(tasks.Regression):
    """An average that no checkpoint would hold."""

    def hooked(self, model: nn.Module, hook: Callable[..., None]) -> Any:
        optimizer = super().optimizer(model)
        optimizer.register_step_post_hook(hook)
        return optimizer


class OnTheTask(Outside):
    def optimizer(self, model: nn.Module) -> Any:
        self.average = AveragedModel(model)
        return self.hooked(model, lambda *_: self.average.update_parameters(model))


class InAClosure(Outside):
    def optimizer(self, model: nn.Module) -> Any:
        average = AveragedModel(model)
        return self.hooked(model, lambda *_: average.update_parameters(model))


class Shadow:
    def __init__(self, model: nn.Module) -> None:
        self.values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def move(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.values["0.bias"] = self.values["0.bias"] * 0.9


class AsAnObject(Outside):
    def optimizer(self, model: nn.Module) -> Any:
        return self.hooked(model, Shadow(model).move)


class CallableShadow(Shadow):
    __call__ = Shadow.move


class AsACallable(Outside):
    def optimizer(self, model: nn.Module) -> Any:
        return self.hooked(model, CallableShadow(model))


def _move(shadow: Shadow, *_: Any) -> None:
    shadow.values["0.bias"] = shadow.values["0.bias"] * 0.9


class AsAnArgument(Outside):
    def optimizer(self, model: nn.Module) -> Any:
        return self.hooked(model, partial(_move, Shadow(model)))


class AsADefault(Outside):
    def optimizer(self, model: nn.Module) -> Any:
        def move(*_: Any, shadow: Shadow = Shadow(model)) -> None:  # noqa: B008 (a usual way to bind a value)
            _move(shadow)

        return self.hooked(model, move)


class AsANumber(Outside):
    def __init__(self) -> None:
        self.updates = 0

    def optimizer(self, model: nn.Module) -> Any:
        return self.hooked(model, self.count)

    def count(self, *_: Any) -> None:
        self.updates += 1


@pytest.mark.parametrize(
    ("task", "name"),
    [
        (OnTheTask, "self.average."),
        (InAClosure, "'average."),
        (AsAnObject, "the object of move().values"),
        (AsACallable, "the hook CallableShadow.values"),
        (AsAnArgument, "an argument of a hook().values"),
        (AsADefault, "a default of move().values"),
        (AsANumber, "'self.updates' was assigned"),
    ],
)
def test_what_the_step_keeps_outside_the_model_is_refused_by_name(
    task: type[Outside], name: str, tmp_path: Path
) -> None:
    failure = gang.train(task, gang.job(task), 1, tmp_path).failure
    assert (failure.kind, failure.step) == ("UnsupportedModelError", 1)
    for word in (name, "optimizer.step()", "no checkpoint holds it", "`average`"):
        assert word in failure.message


class CountedBySchedule(tasks.Momentum):
    """What the function of a schedule assigns would be seen by the first lane of each worker only."""

    progress: float = 0.0

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate)

    def rate(self, step: int) -> float:
        self.progress = step / 10
        return 1 - self.progress

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch) * (1 + self.progress)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_what_the_function_of_a_schedule_assigns_is_refused(workers: int, tmp_path: Path) -> None:
    failure = gang.train(CountedBySchedule, gang.job(CountedBySchedule), workers, tmp_path).failure
    assert (failure.kind, failure.step) == ("UnsupportedModelError", 1)
    assert "'self.progress' was assigned in optimizer.step() or schedule().step()" in failure.message


@pytest.mark.parametrize(
    ("task", "buffer", "value"),
    [(tasks.AveragesInside, "average.n_averaged", 6), (tasks.ScheduledLoss, "progress", 0.6)],
)
def test_what_the_step_changes_inside_the_model_is_not_lost(
    task: type[tasks.Regression], buffer: str, value: float, tmp_path: Path
) -> None:
    spec = gang.job(task, checkpoint={"every": 6})
    ended = gang.train(task, spec, 2, tmp_path)
    assert ended.digest
    replica = Replica(task(), spec)
    folder = CheckpointFolder(tmp_path / "checkpoints")
    newest = folder.search().newest
    assert newest is not None
    replica.load(folder.load(newest).state["replica"])
    assert replica.buffers.get(buffer).item() == pytest.approx(value)
