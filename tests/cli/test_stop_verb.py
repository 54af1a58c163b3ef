import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

import quorate
import schemas
from command import Workplace, await_condition, in_step


def test_a_running_job_is_stopped_cleanly_and_goes_on_to_the_same_bits(workplace: Workplace, undisturbed: str) -> None:
    running = workplace.start("train", "job.yaml", "--workers", "2", "--json", HOLD=in_step(3, workers=2))
    running.await_event("step", at_least=2)
    assert f"quorate stop {workplace.last.name}" in workplace.start("show", "last").done().stdout
    stopping = workplace.start("stop", "last", "--json")
    running.await_asked("stop")
    workplace.go()
    stopped, done = stopping.done(), running.done()
    assert stopped.code == 0, stopped.stderr
    schemas.validate("stop", stopped.document)
    assert (done.code, done.document["status"]) == (130, "interrupted")
    assert stopped.document == {"run": "tiny-0001", "status": "interrupted", "steps": done.document["steps"]}
    assert workplace.checkpoints()[-1].startswith(f"step-{done.document['steps']:08}")
    assert "failure" not in [event["kind"] for event in workplace.events()]
    again = workplace.run("resume", "last", "--json")
    assert again.document["weights_digest"] == undisturbed


def test_now_does_not_wait_for_the_step(workplace: Workplace) -> None:
    running = workplace.start("train", "job.yaml", "--workers", "2", "--json", HOLD=in_step(3, workers=2))
    running.await_event("checkpoint", at_least=2)
    stopped = workplace.start("stop", "last", "--now").done()  # although the step never ends
    assert stopped.code == 0, stopped.stderr
    assert stopped.stdout == "tiny-0001 is interrupted, with its newest checkpoint at step 2.\n"
    done = running.done()
    assert (done.code, done.document["status"]) == (130, "interrupted")
    assert done.error.startswith("stopped at once, by quorate stop --now")
    workplace.assert_nobody_left()
    assert workplace.result()["status"] == "interrupted"


@pytest.mark.parametrize(
    ("place", "now"),
    [
        ("import", []),
        pytest.param("datasets", ["--now"], marks=pytest.mark.long),
        pytest.param("import", ["--now"], marks=pytest.mark.long),
        pytest.param("datasets", [], marks=pytest.mark.long),
    ],
)
def test_one_that_is_being_set_up_is_stopped_at_once(workplace: Workplace, place: str, now: list[str]) -> None:
    running = workplace.start("train", "job.yaml", "--json", TROUBLE=f"slow {place}")
    await_condition(f"the task to be in its {place}", (workplace.folder / f"in-{place}").exists)
    stopped = workplace.start("stop", "last", *now).done()
    assert stopped.code == 0, stopped.stderr
    done = running.done()
    assert (done.code, done.document["status"]) == (130, "interrupted")
    assert "Traceback" not in done.stderr
    workplace.assert_nobody_left()


def test_a_launcher_that_hangs_is_told_with_what_to_do(workplace: Workplace) -> None:
    running = workplace.start("train", "job.yaml", "--workers", "1", "--json", HOLD=in_step(3, workers=1))
    running.await_event("step", at_least=2)
    launcher = running.process.pid
    os.kill(launcher, signal.SIGSTOP)
    try:
        done = workplace.start("stop", "last", "--now", "--timeout", "1").done()
        assert done.code == 1
        assert f"`kill -KILL {launcher}` ends it with every process of the job" in done.error
    finally:
        os.kill(launcher, signal.SIGCONT)
    assert running.done().document["status"] == "interrupted"


def test_it_can_be_stopped_from_python(workplace: Workplace) -> None:
    running = workplace.start("train", "job.yaml", "--workers", "1", "--json", HOLD=in_step(3, workers=1))
    running.await_event("step", at_least=2)
    with ThreadPoolExecutor(1) as thread:
        stopping = thread.submit(quorate.open_run("last", workplace.folder / "runs").stop)
        running.await_asked("stop")
        workplace.go()
        result = stopping.result()
    assert (result.status, running.done().code) == ("interrupted", 130)
    assert 2 <= result.steps < 8
