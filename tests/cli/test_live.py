"""A run as `quorate top` sees it at a moment."""

from pathlib import Path

from history.run_builder import Story, build_run
from quorate.cli.top_view import LiveRun


def test_after_a_resume_the_steps_before_it_are_not_the_last(tmp_path: Path) -> None:
    story = Story().begin(total_steps=100).train(1, 60, loss=9.0)
    story.pause(1000).begin(from_step=20, total_steps=100).train(21, 30, loss=1.0)
    seen = LiveRun(build_run(tmp_path, story=story)).look()
    assert seen.record.steps == 30
    assert seen.losses == {"loss": 1.0}
    assert (seen.step_seconds, seen.samples_per_second) == (1.0, 8.0)
    assert (len(seen.recent), seen.recent[19:21]) == (30, (9.0, 1.0))


def test_a_run_that_has_told_no_step_yet(tmp_path: Path) -> None:
    seen = LiveRun(build_run(tmp_path, story=Story().begin())).look()
    assert (seen.losses, seen.recent, seen.step_seconds, seen.shares) == ({}, (), None, {})
