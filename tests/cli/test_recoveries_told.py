"""What people and programs learn of a recovery: the terminal, the result, the events and `quorate show`."""

import os
import re
import signal
from pathlib import Path

import pytest

from command import JOB, Running, Workplace, await_condition
from quorate.worker.status import read_status
from schemas import validate

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("unmeasured")]

BUSY = 100.0


def start_and_hold_step_5(workplace: Workplace, *arguments: str) -> Running:
    calls = str(4 * JOB["lanes"] // 2 + 1)
    return workplace.start("train", "job.yaml", "--workers", "2", *arguments, HOLD=calls)


def phases(workplace: Workplace) -> dict[int, tuple[int, str]]:
    """Where the workers of the newest run are."""
    pages = {slot: read_status(Path(workplace.last, "logs", f"worker-{slot}.status")) for slot in (0, 1)}
    return {slot: (page.step, page.phase) for slot, page in pages.items() if page is not None}


def test_steps_that_the_lost_host_of_lane_0_had_not_told_are_told_by_another(
    workplace: Workplace, undisturbed: str
) -> None:
    # Heartbeats, which carry events, are a minute apart, and nothing is saved: so nothing is told before the kill.
    running = start_and_hold_step_5(
        workplace,
        "--json",
        "--set",
        "failure_timeout=600",
        "--set",
        "checkpoint.every=100",
        "--set",
        "evaluate.every=100",
    )
    running.await_event("generation")
    held = {0: (5, "compute"), 1: (5, "compute")}
    await_condition("both workers in step 5", lambda: phases(workplace) == held)
    assert not [event for event in workplace.events() if event["kind"] == "step"]
    os.kill(workplace.workers()[0], signal.SIGKILL)
    workplace.go()
    done = running.done(within=BUSY)
    assert done.code == 0, done.stderr
    assert done.document["weights_digest"] == undisturbed
    events = workplace.events()
    assert [event["worker"] for event in events if event["kind"] == "lost"] == [0]
    assert [event["step"] for event in events if event["kind"] == "step"] == list(range(1, 9))
    assert [event["from_step"] for event in events if event["kind"] == "run"] == [0]


def test_a_recovery_is_told_to_people_and_to_programs(workplace: Workplace, undisturbed: str) -> None:
    running = start_and_hold_step_5(workplace)
    running.await_event("step", at_least=4)
    pid = workplace.workers()[1]
    os.kill(pid, signal.SIGKILL)
    # Held until the replacement is there: on a fast machine the job would be over before.
    await_condition("the replacement", lambda: len(workplace.workers()) == 2 and pid not in workplace.workers())
    workplace.go()
    done = running.done(within=BUSY)
    assert done.code == 0, done.stderr
    sentence = rf"^worker 1 \(pid {pid} on host \S+\) was killed by SIGKILL at step [45] while in \w+$"
    assert re.search(sentence, done.stderr, re.MULTILINE), done.stderr
    assert re.search(r"^  recovered +once; training stood still for \S+ s$", done.stdout, re.MULTILINE)
    result = workplace.result()
    assert result["weights_digest"] == undisturbed
    validate("train", result)
    (recovery,) = result["recoveries"]
    assert recovery["step"] in (4, 5)
    assert (recovery["worker"], recovery["steps_lost"]) == (1, 0)
    assert re.match(sentence, recovery["cause"])
    assert recovery["first_step_s"] > 0
    shown = workplace.run("show", "last", "--json")
    validate("show", shown.document)
    assert shown.document["recoveries"] == [recovery]
    assert [loss["worker"] for loss in shown.document["events"]["losses"]] == [1]
    assert shown.document["events"]["generations"][1]["from_step"] == 4
    page = workplace.run("show", "last").stdout
    assert re.search(rf"^  lost +worker 1 \(pid {pid} .* \(after .*\)$", page, re.MULTILINE), page
    assert "in 2 parts" not in page


@pytest.mark.long
def test_by_step_timeout_a_worker_that_hangs_in_user_code_is_replaced(workplace: Workplace, undisturbed: str) -> None:
    running = start_and_hold_step_5(workplace, "--json", "--set", "step_timeout=4.0")
    loss = running.await_event("lost")
    workplace.go()
    done = running.done(within=BUSY)
    assert done.code == 0, done.stderr
    assert done.document["weights_digest"] == undisturbed
    assert "held up in the task's own code (computing its lanes)" in loss["message"]
    assert loss["step"] in (4, 5), "one that is done again counts as a call too"
