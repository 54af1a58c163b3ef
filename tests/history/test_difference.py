import io
import math
from pathlib import Path
from typing import Any

import pytest

from history.run_builder import Story, complete_run
from made_events import fields_of
from quorate.cli.difference_view import print_difference
from quorate.core.task_source import TaskSource
from quorate.history.difference import RunPair, RunSide, compare, differing
from quorate.history.timeline import Timeline
from quorate.observe.events import StepCompleted
from quorate.observe.screen import Screen
from quorate.storage.task_files import keep_source


def timeline(*losses: float, **more: Any) -> Timeline:
    return Timeline(steps={step: StepCompleted(losses={"": loss}, **more) for step, loss in enumerate(losses, 1)})


def test_runs_with_the_same_bits_do_not_part_however_fast_they_were() -> None:
    left = timeline(0.5, 0.25, samples_per_second=1.0)
    found = compare(left, timeline(0.5, 0.25, 0.125, samples_per_second=2.0))
    assert (found.common_steps, found.parting) == (2, None)


def test_the_last_bit_of_a_loss_is_a_parting() -> None:
    found = compare(timeline(0.5, 0.25), timeline(0.5, math.nextafter(0.25, 1.0)))
    assert found.parting is not None
    assert found.parting.step == 2
    assert found.parting.values == {"loss": (0.25, math.nextafter(0.25, 1.0))}


def test_zeros_of_two_signs_differ_and_nan_equals_itself() -> None:
    assert differing({"a": 0.0, "b": math.nan}, {"a": -0.0, "b": math.nan}).keys() == {"a"}


def test_an_optimizer_that_only_one_has_is_a_parting() -> None:
    left = Timeline(steps={1: StepCompleted(losses={"a": 1.0}, gradient_norms={"a": 2.0})})
    right = Timeline(steps={1: StepCompleted(losses={"a": 1.0, "b": 3.0}, gradient_norms={"a": 2.0})})
    parting = compare(left, right).parting
    assert parting is not None
    assert parting.values == {"loss.b": (None, 3.0)}


def test_steps_that_only_one_has_are_not_compared() -> None:
    left = Timeline(steps={step: StepCompleted(losses={"": 1.0}) for step in (5, 6)})
    assert compare(left, timeline(0.5, 0.25)).common_steps == 0


def test_of_a_step_only_what_is_compared_and_its_speed_is_kept(tmp_path: Path) -> None:
    side = RunSide.read(complete_run(tmp_path))
    kept = fields_of(side.timeline.steps[4])
    assert (kept.pop("loss"), set(kept) - {"samples", "samples_per_second"}) == (1 / 4, set())


def test_the_last_numbers_that_both_have_logged(tmp_path: Path) -> None:
    stories = [Story().begin().train(1, 2, log=log) for log in ({"accuracy": 0.5, "norm": 2.0}, {"accuracy": 0.75})]
    left, right = (complete_run(tmp_path, story=story) for story in stories)
    pair = RunPair.read(left, right)
    assert pair.logged == {"accuracy": (0.5, 0.75), "norm": (2.0, None)}
    shown = io.StringIO()
    print_difference(pair, Screen(shown))
    assert "logged at the last step" in shown.getvalue()


def test_a_result_that_is_cut_off_is_warned_of_and_the_rest_is_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left, right = complete_run(tmp_path), complete_run(tmp_path)
    right.result_file.write_text('{"status": "comp')
    pair = RunPair.read(left, right)
    assert (pair.comparison.common_steps, pair.comparison.parting) == (8, None)
    assert pair.weights[1] is None
    assert f"{right.result_file} is not JSON" in caplog.text


def test_the_code_of_two_tasks_is_compared_where_both_runs_keep_it(tmp_path: Path) -> None:
    left, right = complete_run(tmp_path), complete_run(tmp_path)
    keep_source(left.path, TaskSource("task.py", {"task.py": b"RATE = 0.1\n"}), None)
    assert RunPair.read(left, right).source is None
    keep_source(right.path, TaskSource("task.py", {"task.py": b"# Faster.\nRATE = 0.2\n"}), None)
    pair = RunPair.read(left, right)
    assert pair.source == [
        "--- task.py (tiny-0001)",
        "+++ task.py (tiny-0002)",
        "@@ -1 +1,2 @@",
        "-RATE = 0.1",
        "+# Faster.",
        "+RATE = 0.2",
    ]
    told = io.StringIO()
    print_difference(pair, Screen(told))
    assert "\nThe code of their tasks differs:\n" + "\n".join(pair.source) in told.getvalue()
