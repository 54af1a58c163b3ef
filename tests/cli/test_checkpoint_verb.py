"""`quorate checkpoint`: a running job saves, and goes on to the same bits."""

import os
import signal
from typing import Any

import pytest

from command import Running, Workplace, await_condition
from schemas import validate

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("unmeasured")]


def start(workplace: Workplace) -> Running:
    workplace.write_job(checkpoint={"every": None, "keep": 9})
    running = workplace.start("train", "job.yaml", "--workers", "2", "--json", SLOW="0.5")  # until the file `go`
    running.await_event("step", at_least=1)
    return running


def checkpoint(workplace: Workplace) -> dict[str, Any]:
    # Not by `run`, which waits until nobody is left.
    done = workplace.start("checkpoint", "last", "--json").done()
    assert done.code == 0, done.stderr
    validate("checkpoint", done.document)
    return done.document


def test_a_running_job_saves_once_and_ends_with_the_same_bits(workplace: Workplace, undisturbed: str) -> None:
    running = start(workplace)
    saved = checkpoint(workplace)
    assert 1 <= saved["step"] < 8
    workplace.go()
    done = running.done()
    assert done.document["weights_digest"] == undisturbed
    steps = [event["step"] for event in workplace.events() if event["kind"] == "checkpoint"]
    assert steps.count(saved["step"]) == 1, "once, although two workers were told"
    assert set(steps) <= {saved["step"], 4, 8}, "besides at evaluations, the best of which is saved, and at the end"
    assert steps[-1] == 8


@pytest.mark.long
def test_whoever_was_asked_is_stopped_and_the_others_save(workplace: Workplace, undisturbed: str) -> None:
    running = start(workplace)
    stopped = workplace.workers()[0]
    os.kill(stopped, signal.SIGSTOP)
    saved = checkpoint(workplace)
    lost = [event for event in workplace.events() if event["kind"] == "lost"]
    assert [event["worker"] for event in lost] == [0], "the fault has happened"
    await_condition("its end", lambda: stopped not in workplace.pids())
    workplace.go()
    assert running.done().document["weights_digest"] == undisturbed
    assert saved["step"] in [event["step"] for event in workplace.events() if event["kind"] == "checkpoint"]
