"""What a person sees while the real command trains, on a terminal and in a file."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from command import Workplace, await_condition
from quorate.api import session
from quorate.api.prints import Watch
from quorate.api.result import Result
from quorate.api.train import show_on_stderr, show_quietly
from quorate.cli.app import app
from quorate.storage.run_folder import RunFolder
from schemas import validate
from terminal import TerminalCommand

STOPPING = "stopping after the running step, which is saved; Ctrl-C again stops at once"


def screen_after_step(step: int, seen: TerminalCommand) -> list[str] | None:
    """What is on the screen, if all that tells of this step is there."""
    screen = seen.screen
    has_both = len(screen) > 3 and screen[-3].endswith(f"step {step}/8") and screen[-1].endswith("workers")
    return screen if has_both else None


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.long
def test_a_bar_on_a_terminal_ends_cleanly_on_ctrl_c_and_a_resume_in_a_pipe_goes_on_from_there(
    workplace: Workplace,
) -> None:
    in_step_3 = "5"  # two lanes, and so two calls, a worker and step
    with TerminalCommand(workplace.folder, 80, "train", "job.yaml", "--workers", "2", HOLD=in_step_3) as seen:
        word, opening, *_, bar, facts, hosting = await_condition("the second step", lambda: screen_after_step(2, seen))
        seen.interrupt()
        await_condition("the signal to be heard", lambda: STOPPING in seen.screen)
        (workplace.folder / "go").touch()
        assert seen.ended() == 130
    assert word == "[worker 0] a word from the task"
    assert opening == "tiny-0001 in runs/tiny-0001: 4 lanes on 2 workers"
    assert bar.startswith("━")
    assert facts.startswith("epoch 1/")
    assert all(what in facts for what in ("loss ", "lr ", "samples/s"))
    assert hosting.endswith("4 lanes on 2 workers")
    steps = workplace.result()["steps"]
    validate("train", workplace.result())
    screen = seen.screen
    assert STOPPING in screen
    assert sum(f"step {steps}/8" in line for line in screen) == 1
    end = screen.index(f"stopped after {steps} of 8 steps")
    assert any(f"step {steps}/8" in line for line in screen[end - 3 : end - 1])
    assert screen[end - 1].endswith("4 lanes on 2 workers")
    assert screen[end + 1] == "tiny-0001  interrupted"

    done = workplace.run("resume", "last", "--workers", "3", "--json")
    assert done.code == 0
    lines = done.stderr.splitlines()
    assert f"tiny-0001 in runs/tiny-0001: 4 lanes on 3 workers, from step {steps} of 8" in lines
    told = [line.partition("/")[0] for line in lines if line.startswith("step ")]
    assert (told[0], told[-1]) == (f"step {steps + 1}", "step 8")
    assert lines[-1] == "finished after 8 steps"
    assert "\x1b" not in done.stderr
    validate("resume", done.document)


@pytest.mark.parametrize(
    ("flags", "watch"), [(["-q"], show_quietly), (["--quiet"], show_quietly), ([], show_on_stderr)]
)
@pytest.mark.parametrize("verb", ["train", "resume"])
def test_quiet_is_another_way_to_show_the_same_work(
    finished: Path, monkeypatch: pytest.MonkeyPatch, verb: str, flags: list[str], watch: Watch
) -> None:
    asked: list[Watch] = []
    run = RunFolder(finished / "runs" / "tiny-0001")

    def work(*_: object, watch: Watch, **__: object) -> Result:
        asked.append(watch)
        return Result.of(run, run.read_result() or {})

    monkeypatch.setattr(session, "start", lambda _, watch, *__: work(watch=watch))
    monkeypatch.setattr(session, "resume", work)
    reference = {"train": str(finished / "job.yaml"), "resume": str(run.path)}[verb]
    done = CliRunner().invoke(app, [verb, reference, *flags])
    assert (done.exit_code, asked) == (0, [watch])
    assert done.stdout.splitlines()[0] == "tiny-0001  complete"


def test_the_result_of_a_run_is_what_the_schema_says(finished: Path) -> None:
    validate("train", RunFolder(finished / "runs" / "tiny-0001").read_result())
