import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from catalogue import signals
from command import JOB, Running, Workplace, parent_of

# Long for a busy machine, and short beside the step that is held: it would never end.
PROMPTLY = 10 * JOB["failure_timeout"]


def start_and_reach_a_checkpoint(workplace: Workplace, workers: int, *arguments: str, **environment: str) -> Running:
    in_step_5 = str(4 * JOB["lanes"] // workers + 1)  # the first call in it, which never ends
    running = workplace.start(
        "train", "job.yaml", "--workers", str(workers), "--json", *arguments, **{"HOLD": in_step_5, **environment}
    )
    running.await_event("checkpoint", at_least=2)
    running.await_event("step", at_least=4)
    return running


def assert_resumes_to(workplace: Workplace, digest: str, workers: int) -> None:
    resumed = workplace.run("resume", "last", "--workers", str(workers), "--json")
    assert resumed.code == 0
    assert (resumed.document["status"], resumed.document["steps"]) == ("complete", 8)
    assert resumed.document["weights_digest"] == digest
    assert workplace.result()["status"] == "complete"


def lost(workplace: Workplace) -> list[dict[str, Any]]:
    return [event for event in workplace.events() if event["kind"] == "lost"]


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(("workers", "victim"), [(1, 0), (2, 0), (4, -1)])
def test_a_worker_killed_in_a_step_is_replaced_and_the_bits_are_the_same(
    workplace: Workplace, undisturbed: str, workers: int, victim: int
) -> None:
    running = start_and_reach_a_checkpoint(workplace, workers)
    pid = workplace.workers()[victim]
    os.kill(pid, signal.SIGKILL)
    workplace.go()
    done = running.done(within=PROMPTLY)
    assert done.code == 0, done.error
    assert (done.document["status"], done.document["steps"]) == ("complete", 8)
    assert done.document["weights_digest"] == undisturbed
    (loss,) = lost(workplace)
    named = rf"worker {loss['worker']} \(pid {pid} on host \S+\) was killed by SIGKILL at step [45]"
    assert re.match(named, loss["message"])
    steps = [event["step"] for event in workplace.events() if event["kind"] == "step"]
    assert sorted(set(steps)) == list(range(1, 9))
    workplace.assert_nobody_left()


def test_a_worker_that_is_stopped_is_found_by_its_silence_and_replaced(workplace: Workplace, undisturbed: str) -> None:
    running = start_and_reach_a_checkpoint(workplace, 2)
    victim = workplace.workers()[0]
    os.kill(victim, signal.SIGSTOP)
    running.await_event("lost")
    workplace.go()
    done = running.done(within=PROMPTLY)
    assert done.code == 0, done.error
    assert done.document["weights_digest"] == undisturbed
    (loss,) = lost(workplace)
    assert f"pid {victim}" in loss["message"]
    assert "has not been heard for" in loss["message"]
    workplace.assert_nobody_left()


def test_all_workers_killed_go_on_from_the_newest_checkpoint(workplace: Workplace, undisturbed: str) -> None:
    running = start_and_reach_a_checkpoint(workplace, 2)
    for pid in workplace.workers():
        os.kill(pid, signal.SIGKILL)
    workplace.go()
    done = running.done(within=PROMPTLY)
    assert done.code == 0, done.error
    assert done.document["weights_digest"] == undisturbed
    assert len(lost(workplace)) == 2
    workplace.assert_nobody_left()


@pytest.mark.parametrize(("module", "name"), [("quorate.coordinator", "coordinator"), ("quorate.engines", "nursery")])
def test_a_killed_process_that_is_no_worker_is_named(
    workplace: Workplace, undisturbed: str, module: str, name: str
) -> None:
    running = start_and_reach_a_checkpoint(workplace, 2)
    victim = next(pid for pid in workplace.pids(module) if parent_of(pid) == running.process.pid)
    os.kill(victim, signal.SIGKILL)
    done = running.done(within=PROMPTLY)
    assert done.code == 1
    assert re.match(rf"the {name} \(pid {victim}\).* was killed by SIGKILL.* at step \d", done.error)
    assert done.document["failure"]["step"] >= 2
    case = signals.NURSERY_KILLED if name == "nursery" else signals.COORDINATOR_KILLED
    signals.PAGE.hold(case, done, workplace, somewhere=True)
    assert [event["message"] for event in workplace.failures()] == [done.error]
    assert workplace.result()["failure"]["message"] == done.error
    assert not (workplace.last / "coordinator.json").exists()
    workplace.assert_nobody_left()
    if name == "coordinator":
        assert_resumes_to(workplace, undisturbed, 2)


def test_a_coordinator_that_is_stopped_does_not_keep_the_launcher_waiting(workplace: Workplace) -> None:
    running = start_and_reach_a_checkpoint(
        workplace, 2, "--set", "failure_timeout=2", "--steps", "1000", HOLD="0", PAUSE="0.2"
    )
    (victim,) = workplace.pids("quorate.coordinator")
    os.kill(victim, signal.SIGSTOP)
    done = running.done(within=PROMPTLY)
    assert done.code == 1
    assert re.match(r"the coordinator has kept silent about the end of every worker at step \d+;", done.error)
    assert workplace.failures()[-1]["message"] == done.error
    workplace.assert_nobody_left()


@pytest.mark.usefixtures("unmeasured")
def test_a_killed_launcher_takes_everybody_with_it(workplace: Workplace, undisturbed: str) -> None:
    shared_before = set(Path("/dev/shm").iterdir())
    running = start_and_reach_a_checkpoint(workplace, 2, "--set", "loader_workers=1")
    assert len(workplace.pids()) == 1 + 2 + 2 + 2, "launcher, coordinator and nursery, workers, loaders"
    os.kill(running.process.pid, signal.SIGKILL)
    assert running.done().code == -signal.SIGKILL
    workplace.assert_nobody_left()
    assert not [path for path in set(Path("/dev/shm").iterdir()) - shared_before if "torch" in path.name]
    assert not (workplace.last / "coordinator.json").exists()
    assert_resumes_to(workplace, undisturbed, 3)
