"""`quorate top`: a real job on a real terminal."""

import re
from pathlib import Path

import pytest

from command import Workplace, await_condition
from history.run_builder import Story, build_run
from quorate.cli.top_view import LiveRun
from schemas import validate
from terminal import TerminalCommand

pytestmark = pytest.mark.usefixtures("unmeasured")


def drawn(seen: TerminalCommand) -> str:
    """What was drawn last: every frame begins at the upper left corner."""
    return seen.text.rpartition("\x1b[H")[2]


def shown(seen: TerminalCommand) -> str:
    """The same without colours."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn(seen))


def test_a_running_job_is_watched_until_it_has_ended(workplace: Workplace) -> None:
    workplace.write_job(steps=2000)
    running = workplace.start("train", "job.yaml", "--workers", "2", SLOW="0.05")
    running.await_event("step", at_least=1)
    with TerminalCommand(workplace.folder, 110, "top") as seen:
        frame = await_condition("phases of both", lambda: _whole(shown(seen)))
        assert "tiny-0001" in frame
        assert "running" in frame
        assert "loss" in frame
        running.interrupt()
        assert seen.ended() == 0
        assert "interrupted" in shown(seen)
    assert running.done().code == 130
    workplace.assert_nobody_left()


def _whole(frame: str) -> str:
    """A frame in which both workers have told what they are doing."""
    rows = re.findall(r"^[01]  .*(?:data|compute|exchange|apply).* on ", frame, re.MULTILINE)
    return frame if len(rows) == 2 and "samples/s" in frame else ""


def test_jobs_that_run_are_listed_and_ctrl_c_ends_the_view_of_one(workplace: Workplace) -> None:
    workplace.write_job(steps=2000)
    jobs = [workplace.start("train", "job.yaml", "--workers", "1", SLOW="0.05") for _ in range(2)]
    await_condition("both", lambda: sum((run / "coordinator.json").exists() for run in workplace.runs()) == 2)
    listed = workplace.start("top", "--once").done()
    assert listed.code == 0
    assert listed.stdout.startswith("2 running jobs\n")
    document = workplace.start("top", "--json").done().document
    validate("top", document)
    assert {job["run"] for job in document["running"]} == {"tiny-0001", "tiny-0002"}
    with TerminalCommand(workplace.folder, 80, "top", "tiny-0001") as seen:
        await_condition("its view", lambda: "tiny-0001" in shown(seen) and "samples/s" in shown(seen))
        seen.interrupt()
        assert seen.ended() == 0, "Ctrl-C ends the view"
    assert [job.process.poll() for job in jobs] == [None, None], "and not the job"
    for job in jobs:
        only = workplace.start("top", "--once").done()
        assert only.stdout.startswith("tiny-") == (job is jobs[1]), "the only one needs no name"
        job.interrupt()
        assert job.done().code == 130
    workplace.assert_nobody_left()


def test_a_finished_run_is_shown_as_such(used_workplace: Workplace) -> None:
    done = used_workplace.start("top", "last").done()
    assert done.code == 0
    assert done.stdout.splitlines()[0].startswith("tiny-0001  complete  8/8 steps")
    assert "worker  lanes" not in done.stdout
    assert "\x1b" not in done.stdout
    document = used_workplace.start("top", "last", "--json").done().document
    validate("top", document)
    assert (document["status"], document["steps"], document["seconds_left"]) == ("complete", 8, None)


def test_nothing_runs(used_workplace: Workplace) -> None:
    done = used_workplace.start("top").done()
    assert (done.code, done.stdout) == (0, "No job is running in this folder of runs.\n")


def test_no_such_run(workplace: Workplace, tmp_path: Path) -> None:
    assert workplace.start("top", "nothing").done().code == 2


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
