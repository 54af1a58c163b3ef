"""A worker that hangs, for ever or until it is too late: it is out in time, and can change nothing any more."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from command import Workplace, await_condition, parent_of
from trial import REFERENCE, recovered, told, undisturbed_job

pytestmark = [pytest.mark.faults, pytest.mark.long]

KEYS: dict[str, Any] = {"steps": 24, "workers": 2, "failure_timeout": 2.0, "checkpoint": {"every": 8, "keep": 3}}
ALLOWED = KEYS["failure_timeout"] + 0.5


place = undisturbed_job(**KEYS)


@pytest.mark.parametrize("phase", ["exchange", "forward", "checkpoint"])
def test_a_worker_that_is_stopped_for_ever_is_out_in_time(place: Workplace, phase: str) -> None:
    document = recovered(place, f"stop worker 1 at step 8 in {phase} for 60s")
    stopped = document["faults"][0]["firings"][0]["pid"]
    assert not Path(f"/proc/{stopped}").exists()
    (loss,) = told(place, document, "lost")
    assert f"(pid {stopped} on host" in loss["message"]
    assert "has sent no heartbeat for" in loss["message"]
    # From its last heartbeat, which was sent before it was stopped, by the coordinator's own clock.
    assert KEYS["failure_timeout"] <= loss["detect_s"] <= ALLOWED
    (recovery,) = document["recoveries"]
    assert recovery["detect_s"] == loss["detect_s"]
    assert recovery["steps_lost"] == 0


def test_a_worker_that_wakes_after_its_time_changes_nothing_and_ends(place: Workplace) -> None:
    """Nobody kills it: the launcher, which would, is stopped as well until it has ended by itself."""
    running = place.start("train", "job.yaml", "--json", PAUSE="0.05")
    try:
        running.await_event("step", at_least=2)
        victim = place.workers()[0]
        os.kill(running.process.pid, signal.SIGSTOP)
        os.kill(victim, signal.SIGSTOP)
        lost = running.await_event("lost")
        assert f"(pid {victim} on host" in lost["message"]
        running.await_event("step", at_least=lost["step"] + 1)
        os.kill(victim, signal.SIGCONT)
        await_condition("the end of the one who woke up", lambda: parent_of(victim) is None)
    finally:
        running.process.send_signal(signal.SIGCONT)
    done = running.done()
    assert done.code == 0, done.stderr
    assert done.document["weights_digest"] == digest_of_reference(place)
    assert [event["worker"] for event in place.events() if event["kind"] == "lost"] == [lost["worker"]]
    place.assert_nobody_left()


def digest_of_reference(place: Workplace) -> str:
    """The weights of the run that nothing has happened to."""
    shown: str = place.run("show", REFERENCE, "--json").document["weights_digest"]
    return shown
