"""A coordinator dies, and those that follow take too long to begin: workers keep what they have trained."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from command import Running, Workplace, await_condition, parent_of

pytestmark = pytest.mark.faults

SLOW_STARTS = 2
SLOWEST = 600.0
"""Seconds for a job: where the first coordinator was slow to begin, the next ones have minutes."""
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


def kill_coordinator(place: Workplace, running: Running) -> None:
    (coordinator,) = (pid for pid in place.pids("quorate.coordinator") if parent_of(pid) == running.process.pid)
    os.kill(coordinator, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.timeout(SLOWEST + 60.0)
@pytest.mark.parametrize("strategy", ["ring", BOUNDED], ids=["ring", "bounded"])
def test_no_step_is_lost_while_coordinators_do_not_come_to_listen(
    workplace: Workplace, undisturbed: str, strategy: Any
) -> None:
    """For half a minute at least, on a busy machine for minutes; workers used to end after 2.8 × failure_timeout."""
    place, starts = workplace, workplace.temporary / "starts"
    starts.unlink(missing_ok=True)  # of the test before this one, in the same process
    (place.temporary / "sitecustomize.py").write_text(SLOW_COORDINATORS.format(starts=str(starts)))
    # Nothing is saved before the end: whoever gives up loses all.
    checkpoint = {"every": 1000, "keep": 1}
    place.task.write_text(place.task.read_text().replace("return TroubledSgd(", "return torch.optim.SGD("))
    place.write_job(workers=3, failure_timeout=4.0, strategy=strategy, checkpoint=checkpoint)
    path = os.pathsep.join(filter(None, [str(place.temporary), os.environ.get("PYTHONPATH")]))
    running = place.start("train", "job.yaml", "--json", PAUSE="0.1", PYTHONPATH=path)
    running.await_event("step", at_least=2)
    kill_coordinator(place, running)
    done = running.done(SLOWEST)
    assert done.code == 0, done.stderr
    kinds = [event["kind"] for event in place.events()]
    assert "lost" not in kinds
    assert "rollback" not in kinds
    assert kinds.count("coordinator") == 1
    # On a busy machine one more may be too slow.
    assert len(starts.read_text().split()) >= 2 + SLOW_STARTS
    assert done.stderr.count("did not listen within") >= 2 * SLOW_STARTS, "once when it is ended, once as its end"
    assert done.stderr.count("and the launcher ended it") >= SLOW_STARTS
    if strategy == "ring":
        assert [event["step"] for event in place.events() if event["kind"] == "step"] == list(range(1, 9))
        assert done.document["weights_digest"] == undisturbed
    place.assert_nobody_left()


BUSY, KILLS, LONGEST = 50, 10, 2400.0


@pytest.fixture
def busy() -> Iterator[None]:
    """Many processes that want all of the machine."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY)]
    yield
    for process in processes:
        process.kill()
        process.wait()


def has_stepped(place: Workplace, running: Running, replaced: int) -> bool:
    """Whether there has been a step since the coordinator was replaced so many times."""
    assert running.process.poll() is None, running.process.communicate()
    kinds = [event["kind"] for event in place.events()] if place.runs() else []
    return kinds.count("coordinator") == replaced and "step" in (kinds if not replaced else since_last(kinds))


def since_last(kinds: list[str]) -> list[str]:
    return kinds[len(kinds) - kinds[::-1].index("coordinator") :]


@pytest.mark.long
@pytest.mark.timeout(2 * LONGEST)
@pytest.mark.parametrize("job", ["first", "second"])
def test_a_coordinator_that_is_killed_again_and_again_on_a_busy_machine_costs_no_job(
    workplace: Workplace, job: str, busy: None
) -> None:
    place = workplace
    place.write_job(name=job, steps=400, workers=2, failure_timeout=5.0)
    running = place.start("train", "job.yaml", "--json", SLOW="0.2")
    for replaced in range(KILLS):
        await_condition("a step", partial(has_stepped, place, running, replaced), LONGEST)
        kill_coordinator(place, running)
    place.go()
    done = running.done(LONGEST)
    assert done.code == 0, done.stderr
    place.assert_nobody_left()
    (place.folder / "go").unlink()
    place.write_job(name="undisturbed", steps=400, workers=2)
    assert place.train("--json").document["weights_digest"] == done.document["weights_digest"]
