"""One lane: the gradient, losses, log and buffers that it contributes, and what loss() may not give."""

import re
import weakref
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import gang
from plain_gradients import plain_gradients
from quorate.core.errors import LossError, UserCodeError
from quorate.core.failure import Failure
from quorate.replica.losses import LossSum, not_finite
from quorate.replica.replica import Replica
from quorate.replica.state_watch import StateWatch
from quorate.task.task import Task
from quorate.training.activity import Activity
from quorate.training.lane import LaneRunner


class Given(Task):
    """Gives what its `answer` makes of the weight."""

    answer: Any = None

    def model(self) -> nn.Module:
        return nn.ParameterDict({"a": nn.Parameter(torch.ones(1)), "b": nn.Parameter(torch.ones(1))})

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.log("batch", batch)
        return type(self).answer(model, batch)


class Named(Given):
    def optimizer(self, model: nn.Module) -> Any:
        assert isinstance(model, nn.ParameterDict)
        return {name: torch.optim.SGD([model[name]], lr=0.1) for name in ("a", "b")}


class OneLane:
    def __init__(self, answer: Any, task_type: type[Given] = Given) -> None:
        made = type("Made", (task_type,), {"answer": staticmethod(answer)})
        self.task = made()
        self.replica = Replica(self.task, gang.job(task_type))
        self.gradients = plain_gradients(self.replica.trainable, range(2), 25.0)
        self.runner = LaneRunner(self.task, self.replica, self.gradients, StateWatch(self.task, self.replica), seed=1)

    def run(self, *batches: tuple[int, float], batch_samples: int = 4) -> Any:
        return self.runner.run(1, 0, batches, batch_samples)

    @property
    def gradient(self) -> list[float]:
        return [view.item() for view in self.gradients.lanes[0].views]


def test_a_mean_is_weighted_by_the_lanes_share_of_the_batch() -> None:
    lane = OneLane(lambda model, batch: (model["a"] * batch).mean())
    result = lane.run((1, 10.0), (2, 20.0))
    assert lane.gradient == [10 * 1 / 4 + 20 * 2 / 4, 0.0]
    assert result.losses == {"": LossSum(50.0, 3.0)}
    assert (result.samples, result.present, result.log) == (3, 0b01, {"batch": (50.0, 3)})


def test_a_sum_with_its_count_keeps_its_whole_gradient() -> None:
    lane = OneLane(lambda model, batch: ((model["a"] * batch).sum(), torch.tensor(7)))
    result = lane.run((1, 10.0), (2, 20.0))
    assert lane.gradient == [30.0, 0.0]
    assert result.losses == {"": LossSum(30.0, 14.0, per_item=True)}


def test_a_loss_is_what_it_was_when_its_batch_ended_whatever_the_next_writes_to() -> None:
    count = torch.tensor(0.0)
    kept: list[torch.Tensor] = []

    def answer(model: Any, batch: float) -> Any:
        for loss in kept:
            loss.detach().zero_()
        count.fill_(batch)
        kept.append(model["a"].sum() * batch)
        return kept[-1], count

    result = OneLane(answer).run((1, 10.0), (2, 20.0))
    assert result.losses == {"": LossSum(30.0, 30.0, per_item=True)}


def test_named_losses_move_only_their_own_parameters() -> None:
    lane = OneLane(lambda model, batch: {"a": (model["a"] * model["b"]).sum(), "b": model["b"].sum() * 5}, Named)
    result = lane.run((4, 1.0))
    assert lane.gradient == [1.0, 5.0]
    assert result.present == 0b11
    assert set(result.losses) == {"a", "b"}


def test_a_lane_without_samples_contributes_zeros() -> None:
    lane = OneLane(lambda model, batch: model["a"].sum())
    lane.run((4, 1.0))
    result = lane.run()
    assert lane.gradient == [0.0, 0.0]
    assert (result.samples, result.present, result.losses, result.log) == (0, 0, {}, {})


def test_a_lane_draws_from_a_stream_of_its_own() -> None:
    drawn: list[float] = []

    def answer(model: Any, batch: Any) -> torch.Tensor:
        drawn.append(float(torch.rand(1)))
        return torch.as_tensor(model["a"].sum())

    lane = OneLane(answer)
    for step, number in ((1, 0), (1, 1), (2, 0), (1, 0)):
        lane.runner.run(step, number, [(1, 0.0)], 4)
    assert len(set(drawn[:3])) == 3
    assert drawn[3] == drawn[0]


MISTAKES: dict[str, tuple[Any, str]] = {
    "number": (
        lambda model, batch: 1.0,
        "loss() returned the float 1.0; it must return a tensor with one element. Return",
    ),
    "nothing": (
        lambda model, batch: None,
        "loss() returned nothing (None); it must return a tensor with one element. Is a",
    ),
    "vector": (lambda model, batch: model["a"].repeat(3), "a tensor of shape (3,); it must have one element"),
    "constant": (lambda model, batch: torch.tensor(1.0), "does not depend on the parameters"),
    "three values": (
        lambda model, batch: (model["a"].sum(), 1, 2),
        "returned a tuple of 3 values; a tuple must be (sum",
    ),
    "a count of text": (lambda model, batch: (model["a"].sum(), "x"), 'returned the text "x" as the count'),
    "counts": (lambda model, batch: (model["a"].sum(), torch.ones(2)), "returned a Tensor of shape (2,) as the count"),
    "other names": (
        lambda model, batch: {"a": model["a"].sum()},
        "loss() returned a dict with 'a' and optimizer() a single",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_what_loss_may_not_give(case: str) -> None:
    answer, text = MISTAKES[case]
    with pytest.raises(LossError, match=re.escape(text)):
        OneLane(answer).run((1, 1.0))


def test_the_loss_is_found_in_the_whole_output_of_a_model() -> None:
    def alone(model: Any, batch: Any) -> Any:
        return model["a"].sum()

    def as_mapping(model: Any, batch: Any) -> Any:
        return {"loss": model["a"].sum(), "logits": torch.ones(2, 3)}

    def as_object(model: Any, batch: Any) -> Any:
        return SimpleNamespace(loss=model["a"].sum(), logits=torch.ones(2, 3))

    expected = OneLane(alone).run((1, 1.0)).losses
    for answer in (as_mapping, as_object):
        lane = OneLane(answer)
        assert lane.task.metrics(lane.replica.model, 1.0) == {"loss": torch.ones(())}
        assert OneLane(answer).run((1, 1.0)).losses == expected
    with pytest.raises(LossError, match=r"returned the float 1\.0"):
        OneLane(lambda model, batch: {"loss": 1.0}).run((1, 1.0))


def test_what_a_named_loss_may_not_give() -> None:
    with pytest.raises(LossError, match=r"returned the float 1.0 for 'b'; it must return a tensor"):
        OneLane(lambda model, batch: {"a": model["a"].sum(), "b": 1.0}, Named).run((1, 1.0))
    with pytest.raises(LossError, match=r"loss\(\) returned nothing \(None\)"):
        OneLane(lambda model, batch: None, Named).run((1, 1.0))


def test_a_missing_name_is_told_with_both_sets() -> None:
    with pytest.raises(LossError, match=r"a dict with 'a' and optimizer\(\) a dict with 'a', 'b'"):
        OneLane(lambda model, batch: {"a": model["a"].sum()}, Named).run((1, 1.0))


def test_exceptions_in_loss_and_backward_are_the_users() -> None:
    with pytest.raises(UserCodeError, match=r"division by zero \(in loss\(\)\)"):
        OneLane(lambda model, batch: 1 / 0).run((1, 1.0))

    def twice(model: Any, batch: Any) -> Any:
        loss = model["a"].square().sum()
        torch.autograd.grad(loss, [model["a"]])
        return loss

    with pytest.raises(UserCodeError, match=r"in backward\(\)"):
        OneLane(twice).run((1, 1.0))


def test_the_first_loss_that_is_not_finite_is_named() -> None:
    assert not_finite({"": LossSum(1.0, 1.0)}) is None
    assert not_finite({"": LossSum(float("inf"), 1.0)}) == ("loss", float("inf"))
    assert not_finite({"a": LossSum(1.0, 1.0), "b": LossSum(float("-inf"), 1.0)}) == ("loss 'b'", float("-inf"))


def test_the_place_of_an_error_stays_for_the_report_and_times_add_up() -> None:
    told: list[tuple[int, str, int | None]] = []
    activity = Activity(lambda *place: told.append(place))
    activity.begin_step(3)
    with activity.during("data", 1):
        pass
    assert activity.lane is None
    first = activity.seconds["data"]
    with activity.during("data", 2):
        pass
    assert activity.seconds["data"] > first > 0
    with pytest.raises(ValueError, match="x"), activity.during("compute", 2):
        raise ValueError("x")
    assert Failure.of(ValueError()).at(lane=activity.lane, step=activity.step, phase=activity.phase) == Failure(
        "ValueError", "", lane=2, step=3, phase="compute"
    )
    assert told == [(3, "data", 1), (3, "data", 2), (3, "compute", 2)]
    activity.begin_step(4)
    assert set(activity.seconds.values()) == {0.0}


class Marked(torch.autograd.Function):
    """Its part of the graph has a mark, which lives as long."""

    marks: ClassVar[list[weakref.ref[Any]]] = []

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.mark = nn.Identity()
        Marked.marks.append(weakref.ref(ctx.mark))
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class Measured(Given):
    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {"graphs": float(sum(mark() is not None for mark in Marked.marks))}


def test_metrics_of_a_lane_are_not_computed_beside_its_graph() -> None:
    mark: Any = Marked.apply
    lane = OneLane(lambda model, _: mark(model["a"].sum()), Measured)
    lane.replica.spec = lane.replica.spec.model_copy(update={"train_metrics_every": 1})
    lane.runner = LaneRunner(lane.task, lane.replica, lane.gradients, lane.runner.watch, seed=1)
    log = lane.run((2, 0.0), (2, 0.0)).log
    assert len(Marked.marks) == 2
    assert log["graphs"][0] == 0
