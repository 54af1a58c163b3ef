"""`quorate top`: a real job on a real terminal, and keys that ask it for something."""

import re
from pathlib import Path

import pytest

from command import Workplace, await_condition
from schemas import validate
from terminal import TerminalCommand

pytestmark = pytest.mark.usefixtures("unmeasured")


def drawn(seen: TerminalCommand) -> str:
    """What was drawn last: every frame begins at the upper left corner."""
    return seen.text.rpartition("\x1b[H")[2]


def shown(seen: TerminalCommand) -> str:
    """The same without colours."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn(seen))


def test_keys_resize_save_and_stop_a_running_job(workplace: Workplace) -> None:
    workplace.write_job(steps=2000, checkpoint={"every": None, "keep": 3})
    running = workplace.start("train", "job.yaml", "--workers", "2", SLOW="0.05")
    running.await_event("step", at_least=1)
    with TerminalCommand(workplace.folder, 110, "top", "last") as seen:
        frame = await_condition("phases of both", lambda: _whole(shown(seen)))
        assert "tiny-0001" in frame
        assert "running" in frame
        assert "loss" in frame
        seen.type("+")
        await_condition("the answer", lambda: "continuing with 3 workers" in shown(seen))
        running.await_event("resize")
        await_condition("the third", lambda: _members(workplace) == 3)
        seen.type("c")
        await_condition("the checkpoint", lambda: "saved step-" in shown(seen))
        assert workplace.checkpoints()
        seen.type("s")
        await_condition("the question", lambda: "stop tiny-0001, with a checkpoint? y / n" in shown(seen))
        seen.type("n")
        await_condition("it to be gone", lambda: "y / n" not in shown(seen))
        assert running.process.poll() is None
        seen.type("sy")
        await_condition("its end", lambda: "interrupted" in shown(seen))
        seen.type("q")
        assert seen.ended() == 0
    assert running.done().code == 130
    workplace.assert_nobody_left()


def _whole(frame: str) -> str:
    """A frame in which both workers have told what they are doing."""
    rows = re.findall(r"^[01]  .*(?:data|compute|exchange|apply).* on ", frame, re.MULTILINE)
    return frame if len(rows) == 2 and "samples/s" in frame else ""


def _members(workplace: Workplace) -> int:
    return len([event for event in workplace.events() if event["kind"] == "generation"][-1]["members"])


def test_a_job_is_chosen_from_those_that_run(workplace: Workplace) -> None:
    workplace.write_job(steps=2000)
    jobs = [workplace.start("train", "job.yaml", "--workers", "1", SLOW="0.05") for _ in range(2)]
    await_condition("both", lambda: sum((run / "coordinator.json").exists() for run in workplace.runs()) == 2)
    listed = workplace.start("top", "--once").done()
    assert listed.code == 0
    assert listed.stdout.startswith("2 running jobs\n")
    document = workplace.start("top", "--json").done().document
    validate("top", document)
    assert {job["run"] for job in document["running"]} == {"tiny-0001", "tiny-0002"}
    with TerminalCommand(workplace.folder, 80, "top") as seen:
        frame = await_condition("the list", lambda: shown(seen) if "2 running jobs" in shown(seen) else "")
        assert frame.index("tiny-0002") < frame.index("tiny-0001")
        seen.type("\x1b[B")
        await_condition("the second", lambda: "\x1b[7mtiny-0001" in drawn(seen))
        seen.type("\n")
        await_condition("its view", lambda: "save a checkpoint" in shown(seen))
        assert "tiny-0002" not in shown(seen)
        seen.type("\x03")
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
    with TerminalCommand(used_workplace.folder, 80, "top", "last") as seen:
        await_condition("the keys that are left", lambda: "q  quit" in shown(seen))
        assert "workers" not in shown(seen).splitlines()[-1]
        seen.type("c")  # asks nobody
        seen.type("q")
        assert seen.ended() == 0


def test_nothing_runs(used_workplace: Workplace) -> None:
    done = used_workplace.start("top").done()
    assert (done.code, done.stdout) == (0, "No job is running in this folder of runs.\n")


def test_no_such_run(workplace: Workplace, tmp_path: Path) -> None:
    assert workplace.start("top", "nothing").done().code == 2
