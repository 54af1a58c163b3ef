import os
import signal

import pytest

import schemas
from catalogue import signals
from command import Running, Workplace, await_condition, in_step


def test_ctrl_c_stops_cleanly_and_a_resume_on_other_workers_ends_with_the_same_bits(
    workplace: Workplace, undisturbed: str
) -> None:
    running = workplace.start("train", "job.yaml", "--workers", "2", "--json", HOLD=in_step(3, workers=2))
    running.await_event("step", at_least=2)
    running.interrupt()
    go_on_when_stopped(running)
    done = running.done()
    assert (done.code, done.document["status"]) == (130, "interrupted")
    steps = done.document["steps"]
    assert 2 <= steps < 8
    assert "Traceback" not in done.stderr
    assert done.advice == f"quorate resume tiny-0001  (resumes from step {steps})"
    workplace.assert_nobody_left()
    assert workplace.checkpoints()[-1].startswith(f"step-{done.document['steps']:08}")
    kinds = [event["kind"] for event in workplace.events()]
    assert kinds.count("stop") == 1
    assert "failure" not in kinds

    resumed = workplace.run("resume", "last", "--workers", "3", "--json")
    assert resumed.code == 0
    assert (resumed.document["status"], resumed.document["steps"]) == ("complete", 8)
    assert resumed.document["weights_digest"] == undisturbed
    steps = [event["step"] for event in workplace.events() if event["kind"] == "step"]
    assert steps == list(range(1, 9))


def test_ctrl_c_twice_stops_at_once(workplace: Workplace) -> None:
    running = workplace.start("train", "job.yaml", "--workers", "2", "--json", HOLD=in_step(1, workers=2))
    await_computing(running)
    running.interrupt()
    running.await_event("stop")
    running.interrupt()
    done = running.done()  # although the step never ends
    signals.PAGE.hold(signals.AT_ONCE, done, workplace)
    workplace.assert_nobody_left()
    assert [event["message"] for event in workplace.failures()] == [done.error]


@pytest.mark.usefixtures("unmeasured")
def test_a_closed_terminal_leaves_a_checkpoint(workplace: Workplace) -> None:
    running = workplace.start("train", "job.yaml", "--workers", "1", HOLD=in_step(2, workers=1))
    running.await_event("step", at_least=1)
    for number in (signal.SIGHUP, signal.SIGHUP):  # the shell's and the terminal's
        running.process.send_signal(number)
    go_on_when_stopped(running)
    done = running.done()
    assert done.code == 143
    assert "terminated" in done.stdout
    assert workplace.result()["status"] == "terminated"
    assert workplace.checkpoints()
    workplace.assert_nobody_left()


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("place", [pytest.param("import", marks=pytest.mark.long), "datasets"])
def test_ctrl_c_before_the_first_step_ends_at_once(workplace: Workplace, place: str) -> None:
    running = workplace.start("train", "job.yaml", "--json", TROUBLE=f"slow {place}")
    await_condition(f"the task to be in its {place}", (workplace.folder / f"in-{place}").exists)
    running.interrupt()
    done = running.done()
    assert (done.code, done.document["status"], done.document["steps"]) == (130, "interrupted", 0)
    assert "Traceback" not in done.stderr
    assert done.advice == "train again; nothing was trained yet, so there is nothing to resume"
    workplace.assert_nobody_left()
    assert workplace.failures() == []
    again = workplace.run("resume", "last")
    assert again.code == 2
    assert "ended before its first checkpoint" in again.error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_in_the_first_moments_is_quiet(workplace: Workplace, number: signal.Signals) -> None:
    # Found before the real one, and imported by our own code: it shows when Python's start is over, and takes long.
    (workplace.folder / "typer.py").write_text("import pathlib, time; pathlib.Path('sign').touch(); time.sleep(600)")
    running = workplace.start("train", "job.yaml", "--json", PYTHONPATH=str(workplace.folder))
    await_condition("the first imports", (workplace.folder / "sign").exists)
    os.killpg(running.process.pid, number)
    done = running.done()
    is_typed = number == signal.SIGINT
    status, code = ("interrupted", 130) if is_typed else ("terminated", 143)
    assert (done.code, done.stderr) == (code, f"{status}\n")
    assert done.document == {"status": status, "exit_code": code, "error": status}
    schemas.validate("error", done.document)


def go_on_when_stopped(running: Running) -> None:
    """Let the step go on that the task holds, but only after the signal was heard, by a worker too."""
    running.await_asked("stop")
    (running.workplace.folder / "go").touch()


def await_computing(running: Running) -> None:
    """Wait until the workers are in their first step."""
    running.await_event("generation")
    logs = running.workplace.last / "logs"
    await_condition("the first lane", lambda: b"compute" in (logs / "worker-0.status").read_bytes())
