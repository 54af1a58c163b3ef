"""A coordinator dies, and those that follow take too long to begin: workers keep what they have trained."""

import os
import signal
from typing import Any

import pytest

from command import Workplace, await_condition, parent_of

pytestmark = pytest.mark.faults

SLOW_STARTS = 2
# Run by every interpreter of the job. Of coordinators the first begins, those that follow do not, and the next does.
SLOW_COORDINATORS = f"""
import pathlib, sys, time

if "quorate.coordinator" in sys.orig_argv:
    with open({{starts!r}}, "a+") as starts:
        starts.write("one\\n")
    if 1 < len(pathlib.Path({{starts!r}}).read_text().split()) <= 1 + {SLOW_STARTS}:
        time.sleep(600)
"""
BOUNDED = {"kind": "parameter-server", "servers": 2, "mode": "bounded", "staleness": 2}


@pytest.mark.parametrize("strategy", ["ring", BOUNDED], ids=["ring", "bounded"])
def test_no_step_is_lost_while_coordinators_do_not_come_to_listen(
    workplace: Workplace, undisturbed: str, strategy: Any
) -> None:
    """For longer than twice the lease of workers with `failure_timeout: 2`, which used to end after 5.6 s."""
    place, starts = workplace, workplace.temporary / "starts"
    (place.temporary / "sitecustomize.py").write_text(SLOW_COORDINATORS.format(starts=str(starts)))
    # Nothing is saved before the end: whoever gives up loses all.
    checkpoint = {"every": 1000, "keep": 1}
    place.task.write_text(place.task.read_text().replace("return TroubledSgd(", "return torch.optim.SGD("))
    place.write_job(workers=3, failure_timeout=2.0, strategy=strategy, checkpoint=checkpoint)
    running = place.start("train", "job.yaml", "--json", PAUSE="0.1", PYTHONPATH=str(place.temporary))
    running.await_event("step", at_least=2)
    (coordinator,) = (pid for pid in place.pids("quorate.coordinator") if parent_of(pid) == running.process.pid)
    os.kill(coordinator, signal.SIGKILL)
    await_condition("the one that begins", lambda: len(starts.read_text().split()) == 2 + SLOW_STARTS)
    done = running.done()
    assert done.code == 0, done.stderr
    assert done.stderr.count("did not listen within") == 2 * SLOW_STARTS, "once when it is ended, once as its end"
    assert done.stderr.count("and the launcher ended it") == SLOW_STARTS
    kinds = [event["kind"] for event in place.events()]
    assert "lost" not in kinds
    assert "rollback" not in kinds
    assert kinds.count("coordinator") == 1
    if strategy == "ring":
        assert [event["step"] for event in place.events() if event["kind"] == "step"] == list(range(1, 9))
        assert done.document["weights_digest"] == undisturbed
    place.assert_nobody_left()
