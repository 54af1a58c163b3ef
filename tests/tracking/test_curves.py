"""Points of events: their names, and that each is made once, however often a step is told."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from made_events import EVERY, make_event
from quorate.history.curves import Curves, Point, StepSet
from quorate.observe.event import Event
from quorate.observe.events import EvaluationDone, RolledBack, RunFinished, StepCompleted
from quorate.tracking.tracker import Held, Series


def step(number: int, loss: float | None = None, time: float = 0.0) -> StepCompleted:
    told = 1.0 / number if loss is None else loss
    return StepCompleted(step=number, time=time, losses={"": told}, samples_per_second=100.0 + time)


def made(*events: Event, every: int = 1) -> list[Point]:
    curves = Curves(every)
    return [point for event in events for point in curves.points(event)]


def named(points: list[Point]) -> dict[str, float]:
    return {point.name: point.value for point in points}


def test_the_points_of_a_step() -> None:
    event = StepCompleted(
        step=3,
        time=12.5,
        epoch=1,
        losses={"": 0.1 + 0.2},
        learning_rates={"": 0.1},
        gradient_norms={"": 2.0},
        samples_per_second=123.4,
        data_s=0.1,
        compute_s=0.2,
        exchange_s=0.1,
        apply_s=0.1,
        log={"accuracy": 0.5, "note": "text", "loss": 9.0},
    )
    points = made(event)
    assert {(point.step, point.time) for point in points} == {(3, 12.5)}
    assert named(points) == {
        "train/loss": 0.1 + 0.2,
        "train/learning_rate": 0.1,
        "train/grad_norm": 2.0,
        "train/throughput": 123.4,
        "train/epoch": 1.0,
        "train/accuracy": 0.5,
        "train/loss.logged": 9.0,
        "time/data": pytest.approx(0.2),
        "time/compute": pytest.approx(0.4),
        "time/exchange": pytest.approx(0.2),
        "time/apply": pytest.approx(0.2),
    }


def test_several_optimizers_and_a_step_without_a_loss() -> None:
    event = StepCompleted(step=1, losses={"make": 0.5, "judge": None}, learning_rates={"make": 0.1, "judge": 0.2})
    assert named(made(event)) == {
        "train/loss.make": 0.5,
        "train/learning_rate.make": 0.1,
        "train/learning_rate.judge": 0.2,
    }


def test_what_is_not_finite_is_a_point_too() -> None:
    values = named(made(StepCompleted(step=1, losses={"": math.nan}, gradient_norms={"": math.inf})))
    assert math.isnan(values["train/loss"])
    assert values["train/grad_norm"] == math.inf


def test_metrics_of_an_evaluation_are_never_thinned() -> None:
    points = made(step(7), EvaluationDone(step=7, metrics={"accuracy": 0.75, "matrix": [1]}), every=10)
    assert points == [Point("val/accuracy", 0.75, 7, points[0].time)]


def test_looks_at_machines_by_their_fields() -> None:
    def sample(worker: int, host: str, **fields: object) -> Event:
        return make_event("system", None, {"worker": worker, "host": host, **fields})

    gpu = {"index": 1, "name": "some GPU", "use_percent": 90.0, "power_watts": None}
    points = made(
        step(4),
        sample(0, "a", cpu_percent=50.0, machine={"cpu_percent": 20.0, "disk_free_bytes": 7}, gpus=[gpu]),
        sample(1, "a", cpu_percent=60.0, busy=True),
        sample(2, "b", cpu_percent=70.0, machine={"cpu_percent": 30.0}, gpus=[gpu]),
    )
    assert {point.name: (point.value, point.step) for point in points if point.is_sample} == {
        "system/worker-0/cpu_percent": (50.0, 4),
        "system/cpu_percent": (20.0, 4),
        "system/disk_free_bytes": (7.0, 4),
        "system/gpu-1/use_percent": (90.0, 4),
        "system/worker-1/cpu_percent": (60.0, 4),
        "system/b/worker-2/cpu_percent": (70.0, 4),
        "system/b/cpu_percent": (30.0, 4),
        "system/b/gpu-1/use_percent": (90.0, 4),
    }


@pytest.mark.parametrize(
    ("ending", "steps"), [("complete", [3, 6, 7]), ("early stop", [3, 6, 7]), ("interrupted", [3, 6])]
)
def test_thinned_by_steps_with_the_last_of_a_job_that_is_complete(ending: str, steps: list[int]) -> None:
    points = made(*map(step, range(1, 8)), RunFinished(result={"ending": ending}), every=3)
    assert [point.step for point in points if point.name == "train/loss"] == steps


def test_a_step_that_is_told_again_is_no_point_and_a_wrong_one_is_corrected() -> None:
    right = step(3, time=9.0)
    points = made(step(1), step(2), step(3, loss=5.0), RolledBack(step=1), step(2, time=8.0), right, right)
    losses = [(point.step, point.value, point.corrects) for point in points if point.name == "train/loss"]
    assert losses == [(1, 1.0, False), (2, 0.5, False), (3, 5.0, False), (3, 1 / 3, True)]
    assert len([point for point in points if point.name == "train/throughput"]) == 3


def test_every_kind_is_taken() -> None:
    curves = Curves()
    for event in (*EVERY, *reversed(EVERY)):
        curves.points(event)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), max_size=6), st.integers(1, 7))
def test_however_often_a_run_goes_back_its_curve_is_the_undisturbed_one(
    parts: list[tuple[int, int]], every: int
) -> None:
    """Each part begins after some step that was told before, as after a rollback or when a run is resumed."""
    last, told, time = 0, list[Event](), 0.0
    for back, length in [*parts, (0, 40)]:
        begin = max(0, last - back)
        for number in range(begin + 1, begin + length + 1):
            time += 1.0
            told.append(step(number, time=time))
            if number % 5 == 0:
                told.append(EvaluationDone(step=number, time=time, metrics={"accuracy": number / 100}))
        last = max(last, begin + length)
    end = RunFinished(result={"ending": "complete"})
    undisturbed = [step(number) for number in range(1, last + 1)]
    evaluations = [EvaluationDone(step=number, metrics={"accuracy": number / 100}) for number in range(5, last + 1, 5)]

    def curve(*events: Event) -> list[tuple[str, int, float]]:
        points = made(*events, every=every)
        return sorted((point.name, point.step, point.value) for point in points if point.name != "train/throughput")

    assert curve(*told, end) == curve(*undisturbed, *evaluations, end)


@given(st.sets(st.integers(0, 20_000), max_size=50), st.integers(0, 20_000))
def test_a_set_of_steps(steps: set[int], other: int) -> None:
    held = StepSet()
    assert all(held.add(number) for number in steps)
    assert not any(held.add(number) for number in steps)
    assert (other in held) == (other in steps)


def test_what_is_held_is_not_lacking() -> None:
    held, point, sample = Held(), Point("train/loss", 1.0, 5, 2.0), Point("system/cpu", 1.0, 5, 2.0)
    assert held.lacks(point) and held.lacks(sample)
    held.add(point)
    held.add(sample)
    assert not held.lacks(point._replace(time=3.0)) and not held.lacks(sample._replace(step=6))
    assert held.lacks(point._replace(step=4)) and held.lacks(sample._replace(time=2.5))
    assert held.lacks(point._replace(corrects=True))


def test_the_shape_of_a_long_curve_takes_little_room() -> None:
    series = Series()
    for number in range(100_000):
        series.add(Point("train/loss", float(number), number, 0.0))
        series.add(Point("train/throughput", 1.0, number, 0.0))
    assert set(series.curves) == {"train/loss"}
    steps = [at for at, _ in series.curves["train/loss"]]
    assert 1000 < len(steps) <= 4000
    assert len({after - before for before, after in itertools.pairwise(steps)}) == 1
