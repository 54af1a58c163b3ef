import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from command import JOB, Running, Workplace, await_condition, parent_of

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("unmeasured")]

# Long for a busy machine, and short beside the step that is held: it would never end.
PROMPTLY = 100.0


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


def finish(workplace: Workplace, running: Running, digest: str) -> dict[str, Any]:
    """What the job comes to once its losses are let go: the bits of an undisturbed one, and nobody is left."""
    workplace.go()
    done = running.done(within=PROMPTLY)
    assert done.code == 0, done.error
    assert done.document["weights_digest"] == digest
    workplace.assert_nobody_left()
    return done.document


def lost(workplace: Workplace) -> list[dict[str, Any]]:
    return [event for event in workplace.events() if event["kind"] == "lost"]


def warnings(workplace: Workplace) -> str:
    """What the first step of the runbook shows."""
    return workplace.start("logs", "last", "--level", "warning").done().stdout


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("workers", "victim"),
    [pytest.param(1, 0, marks=pytest.mark.long), (2, 0), pytest.param(4, -1, marks=pytest.mark.long)],
)
def test_a_worker_killed_in_a_step_is_replaced_and_the_bits_are_the_same(
    workplace: Workplace, undisturbed: str, workers: int, victim: int
) -> None:
    running = start_and_reach_a_checkpoint(workplace, workers)
    pid = workplace.workers()[victim]
    os.kill(pid, signal.SIGKILL)
    document = finish(workplace, running, undisturbed)
    assert (document["status"], document["steps"]) == ("complete", 8)
    (loss,) = lost(workplace)
    named = rf"worker {loss['worker']} \(pid {pid} on host \S+\) was killed by SIGKILL at step [45]"
    assert re.match(named, loss["message"])
    steps = [event["step"] for event in workplace.events() if event["kind"] == "step"]
    assert sorted(set(steps)) == list(range(1, 9))
    assert loss["message"] in warnings(workplace)


def test_a_loader_that_is_killed_costs_a_generation_as_its_worker_would(workplace: Workplace, undisturbed: str) -> None:
    running = start_and_reach_a_checkpoint(workplace, 2, "--set", "loader_workers=2")
    workers = [pid for pid in workplace.workers() if parent_of(pid) not in workplace.workers()]
    victim = next(pid for pid in workplace.workers() if parent_of(pid) == workers[1])
    os.kill(victim, signal.SIGKILL)
    assert len(finish(workplace, running, undisturbed)["recoveries"]) == 1
    (loss,) = lost(workplace)
    named = rf"worker {loss['worker']} \(pid {workers[1]} on host \S+\) gave up at step \d while in data: its loader"
    assert re.match(rf"{named} process {victim} was killed by SIGKILL\..* It was to read samples ", loss["message"])


@pytest.mark.long
@pytest.mark.usefixtures("cold")
def test_a_job_with_loaders_needs_no_dev_shm(workplace: Workplace, undisturbed: str) -> None:
    """It is read-only here: neither memory nor a semaphore can be made in it."""
    mount = "mount --make-rprivate / && mount -t tmpfs -o ro none /dev/shm"
    tried = subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no mount namespace can be had here: {tried.stderr.strip()}")
    train = shlex.join([sys.executable, "-m", "quorate", "train", "job.yaml", "--json", "--workers", "2"])
    command = ["unshare", "-m", "sh", "-c", f"{mount} && exec {train} --set loader_workers=2"]
    done = subprocess.run(command, cwd=workplace.folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["weights_digest"] == undisturbed


def test_all_workers_killed_go_on_from_the_newest_checkpoint(workplace: Workplace, undisturbed: str) -> None:
    running = start_and_reach_a_checkpoint(workplace, 2)
    for pid in workplace.workers():
        os.kill(pid, signal.SIGKILL)
    finish(workplace, running, undisturbed)
    assert len(lost(workplace)) == 2
    shown = warnings(workplace)
    assert all(loss["message"] in shown for loss in lost(workplace))
    assert re.search(r"worker [01] is started from step-0\S+: nobody holds a newer state", shown)


def keeper(workplace: Workplace, running: Running, module: str) -> int:
    """The process of a module that the launcher keeps."""
    (found,) = [pid for pid in workplace.pids(module) if parent_of(pid) == running.process.pid]
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
def test_a_coordinator_that_is_gone_or_hangs_is_replaced_and_nobody_is_lost(
    workplace: Workplace, undisturbed: str, number: int
) -> None:
    running = start_and_reach_a_checkpoint(workplace, 2)
    victim = keeper(workplace, running, "quorate.coordinator")
    os.kill(victim, number)
    running.await_event("coordinator")
    assert finish(workplace, running, undisturbed)["recoveries"] == []
    (told,) = [event for event in workplace.events() if event["kind"] == "coordinator"]
    assert (told["incarnation"], told["present"]) == (2, 2)
    steps = [event["step"] for event in workplace.events() if event["kind"] == "step"]
    assert sorted(steps) == list(range(1, 9)), "each is told once, by whichever coordinator"
    assert not Path(f"/proc/{victim}").exists()
    assert "another coordinator has taken over, and waits for 2 processes" in warnings(workplace)


@pytest.mark.long
def test_a_coordinator_that_dies_with_a_worker_is_replaced_first(workplace: Workplace, undisturbed: str) -> None:
    running = start_and_reach_a_checkpoint(workplace, 2)
    os.kill(keeper(workplace, running, "quorate.coordinator"), signal.SIGKILL)
    os.kill(workplace.workers()[0], signal.SIGKILL)
    running.await_event("lost")
    assert len(finish(workplace, running, undisturbed)["recoveries"]) == 1


@pytest.mark.long
def test_a_coordinator_that_dies_again_and_again_ends_the_job(workplace: Workplace, undisturbed: str) -> None:
    running = start_and_reach_a_checkpoint(workplace, 2)
    dead = 0
    while running.process.poll() is None:
        for pid in workplace.pids("quorate.coordinator"):
            os.kill(pid, signal.SIGKILL)
            dead += 1
    done = running.done(within=PROMPTLY)
    assert done.code == 1
    assert dead > 5
    assert re.match(r"the coordinator \(pid \d+\) was killed by SIGKILL at step \d, as those before it", done.error)
    assert [event["message"] for event in workplace.failures()] == [done.error]
    assert workplace.result()["failure"]["message"] == done.error
    assert not (workplace.last / "coordinator.json").exists()
    workplace.assert_nobody_left()
    assert_resumes_to(workplace, undisturbed, 2)


def test_a_fork_server_that_is_killed_is_replaced_and_so_are_its_workers(
    workplace: Workplace, undisturbed: str
) -> None:
    running = start_and_reach_a_checkpoint(workplace, 2)
    os.kill(keeper(workplace, running, "quorate.engines.fork_server"), signal.SIGKILL)
    running.await_event("lost", at_least=1)
    finish(workplace, running, undisturbed)
    assert len(lost(workplace)) == 2


@pytest.mark.usefixtures("unmeasured")
def test_a_killed_launcher_takes_everybody_with_it(workplace: Workplace, undisturbed: str) -> None:
    running = start_and_reach_a_checkpoint(workplace, 2, "--set", "loader_workers=1")
    # Launcher; coordinator and fork server; workers; loaders.
    family = await_condition("them all", lambda: found if len(found := workplace.pids()) == 1 + 2 + 2 + 2 else None)
    os.kill(running.process.pid, signal.SIGKILL)
    assert running.done().code == -signal.SIGKILL
    workplace.assert_nobody_left()
    # Not all that is new there: other jobs of this machine have theirs.
    assert [path for pid in family for path in Path("/dev/shm").glob(f"torch_{pid}_*")] == []
    assert not (workplace.last / "coordinator.json").exists()
    assert_resumes_to(workplace, undisturbed, 3)
