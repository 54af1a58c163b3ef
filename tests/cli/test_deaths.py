import os
import re
import signal
from pathlib import Path

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


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(("workers", "afterwards"), [(1, 2), (4, 1)])
def test_a_worker_killed_in_a_step_ends_the_job_promptly_and_a_resume_goes_on_to_the_same_bits(
    workplace: Workplace, undisturbed: str, workers: int, afterwards: int
) -> None:
    running = start_and_reach_a_checkpoint(workplace, workers)
    victim = workplace.workers()[-1]
    os.kill(victim, signal.SIGKILL)
    done = running.done(within=PROMPTLY)
    assert done.code == 1
    assert re.match(rf"worker {workers - 1} \(pid {victim} on host \S+\) was killed by SIGKILL at step \d", done.error)
    assert done.error.count("was killed by") == 1
    if workers == 4:
        signals.PAGE.hold(signals.WORKER_KILLED, done, workplace, somewhere=True)
    failure = done.document["failure"]
    assert failure["message"] == done.error
    assert (failure["kind"], failure["worker"]) == ("WorkerLost", workers - 1)
    assert failure["step"] == 5
    assert workplace.result()["failure"] == failure
    assert [event["message"] for event in workplace.failures()] == [done.error]
    workplace.assert_nobody_left()
    if workers > 1:
        # Who took part in a step has heard from everybody that the one before the last was done.
        steps = [event["step"] for event in workplace.events() if event["kind"] == "step"]
        assert steps == list(range(1, len(steps) + 1))
        assert steps[-1] >= failure["step"] - 2
    assert_resumes_to(workplace, undisturbed, afterwards)


def test_a_worker_that_is_stopped_is_found_by_its_silence(workplace: Workplace) -> None:
    running = start_and_reach_a_checkpoint(workplace, 2)
    victim = workplace.workers()[0]
    os.kill(victim, signal.SIGSTOP)
    done = running.done(within=PROMPTLY)
    assert done.code == 1
    assert f"pid {victim}" in done.error
    signals.PAGE.hold(signals.WORKER_STOPPED, done, workplace, somewhere=True)
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
