import math
from pathlib import Path

import pytest

from history.run_builder import Story, build_run, whole_story
from quorate.history.event_index import read_timeline
from quorate.history.timeline import RunPace, Timeline, logged_curves, loss_curves, metric_curves


def told(folder: Path, story: Story) -> Timeline:
    return Timeline.read(build_run(folder, story=story).events_file)


def test_the_loss_by_step(tmp_path: Path) -> None:
    (curve,) = loss_curves(told(tmp_path, whole_story()))
    assert curve.name == "loss"
    assert curve.points[:2] == ((1, 1.0), (2, 0.5))
    assert (curve.first, curve.last, curve.least, curve.greatest) == (1.0, 0.125, (8, 0.125), (1, 1.0))
    assert curve.values[2] == pytest.approx(1 / 3)


def test_a_curve_for_each_optimizer_and_each_metric(tmp_path: Path) -> None:
    story = Story().begin()
    story.tell("step", 1, **{"loss.generator": 1.0, "loss.critic": 2.0, "losses": 3.0})
    story.evaluate(1, loss=1.0, accuracy=0.5).evaluate(2, loss=math.nan, accuracy=0.75)
    timeline = told(tmp_path, story)
    assert [curve.name for curve in loss_curves(timeline)] == ["loss.generator", "loss.critic"]
    assert {curve.name: curve.points for curve in metric_curves(timeline)} == {
        "loss": ((1, 1.0),),
        "accuracy": ((1, 0.5), (2, 0.75)),
    }


def test_what_is_no_number_is_left_out(tmp_path: Path) -> None:
    story = Story().begin().train(1, 1, loss="high").train(2, 2, loss=math.inf).evaluate(2, loss=math.nan)
    timeline = told(tmp_path, story)
    assert loss_curves(timeline) == metric_curves(timeline) == ()


def test_pace_is_a_mean_by_time_and_not_by_step(tmp_path: Path) -> None:
    story = Story().begin().train(1, 1, samples_per_second=80.0).train(2, 2, samples_per_second=800.0)
    pace = RunPace.of(told(tmp_path, story))
    assert pace is not None
    assert pace.samples_per_second == pytest.approx(16 / 0.11)
    assert pace.step_seconds == pytest.approx(0.055)
    assert pace.shares == {"compute": pytest.approx(0.1 / 0.11)}


def test_without_timed_steps_there_is_no_pace(tmp_path: Path) -> None:
    assert RunPace.of(Timeline()) is None
    for speed in ("fast", math.inf, math.nan, 0.0, -3.0):
        assert RunPace.of(told(tmp_path, Story().begin().train(1, 2, samples_per_second=speed))) is None


def test_what_a_task_logs_has_curves_by_its_own_names_in_long_and_in_short_runs(tmp_path: Path) -> None:
    story = Story().begin().train(1, 3, log={"accuracy": 0.5, "note": "text"}).train(4, 4, log={"accuracy": 0.75})
    short = told(tmp_path, story)
    (curve,) = logged_curves(short)
    assert (curve.name, curve.points) == ("accuracy", ((1, 0.5), (2, 0.5), (3, 0.5), (4, 0.75)))
    (same,) = logged_curves(read_timeline(build_run(tmp_path / "runs", story=story).events_file, as_rows=True))
    assert (same.name, same.points) == (curve.name, curve.points)
