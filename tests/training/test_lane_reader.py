"""What lanes read, ahead of the device that computes them: in the order of the plan, once, and timed as reading."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gang
from bits import bit_tasks as tasks
from quorate.core.generation import COMPUTE, DATA, Cursor
from quorate.data.sampler import LaneSampler, StepPlans
from quorate.data.samples import Batch
from quorate.replica.device import Device
from quorate.training import activity as activity_module
from quorate.training.activity import Activity
from quorate.training.hosted_lanes import AheadReader

HOSTED = range(1, 3)
LAST = 3


class Away(Device):
    """Not the host's memory. It marks what was sent there."""

    is_host = False

    def __init__(self, left: int = 99) -> None:
        super().__init__()
        self.left = left

    def move(self, batch: Any) -> Any:
        if not self.left:
            raise torch.OutOfMemoryError
        self.left -= 1
        return f"sent {batch}"


class PlannedFeed:
    """Says what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.plans: list[Iterator[Any]] = []

    def next(self, request: Any) -> Batch:
        self.asked.append(request.lane)
        return Batch(request.indices, f"lane {request.lane}")

    def begin_again(self, requests: Iterator[Any]) -> None:
        self.plans.append(requests)


class Reading:
    """A reader of two lanes with one micro-batch each; an evaluation follows step 2."""

    def __init__(self, device: Device | None = None) -> None:
        self.feed = PlannedFeed()
        self.activity = Activity(lambda *_: None)
        self.activity.begin_step(1)
        sampler: Any = LaneSampler(gang.job(tasks.Regression, lanes=3, batch_size=3, steps=8), 96, lambda *_: None)
        plans = StepPlans(sampler, HOSTED, ())
        evaluation = SimpleNamespace(is_due=lambda step, _: step == 2)
        given: Any = (self.feed, sampler, evaluation, HOSTED, self.activity, device or Away(), plans, LAST)
        self.reader = AheadReader(*given)

    def ahead(self, step: int, lane: int) -> None:
        self.reader.read_ahead(step, lane)

    def read(self, step: int, lane: int) -> list[Any]:
        return [batch.content for batch in self.reader.read(step, lane)]


def test_what_was_read_ahead_is_on_the_device_and_is_not_asked_for_again() -> None:
    reading = Reading()
    assert reading.read(1, 1) == ["lane 1"]
    reading.ahead(1, 1)
    assert reading.read(1, 2) == ["sent lane 2"]
    reading.ahead(1, 2)
    assert reading.read(2, 1) == ["sent lane 1"]
    assert reading.feed.asked == [1, 2, 1]


@pytest.mark.parametrize("step", [2, LAST])
def test_nothing_is_read_ahead_past_an_evaluation_or_the_end(step: int) -> None:
    reading = Reading()
    reading.ahead(step, 2)
    assert reading.feed.asked == []


def test_a_device_without_room_has_the_batch_later() -> None:
    reading = Reading(Away(left=0))
    reading.ahead(1, 1)
    assert reading.read(1, 2) == ["lane 2"]
    assert reading.feed.asked == [2]


def test_another_plan_forgets_what_was_read_by_the_last() -> None:
    reading = Reading()
    reading.ahead(1, 1)
    reading.reader.begin_again(Cursor(0), ())
    assert reading.read(1, 2) == ["lane 2"]
    assert len(reading.feed.plans) == 1


def test_the_time_of_another_phase_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 18.0])
    monkeypatch.setattr(activity_module, "perf_counter", lambda: next(times))
    activity = Activity(lambda *_: None)
    activity.begin_step(1)
    activity.enter(COMPUTE)
    activity.count_as(DATA, 5.0)
    activity.leave()
    assert (activity.seconds[DATA], activity.seconds[COMPUTE]) == (5.0, 3.0)
