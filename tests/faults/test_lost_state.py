"""The last one that holds the state of a job dies: what was saved is taken up again, or missed aloud."""

import os
import shutil
import signal
from typing import Any

import pytest

from command import TASK_SOURCE, Running, Workplace, await_condition

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("unmeasured")]

# In the fourth step all wait for the file `go`, when the checkpoint of the second has been saved.
HELD = {"HOLD": "7"}
# Once there is a file `gate`, whoever is built waits for the file `open`.
GATED = """

class Gated(Tiny):
    def datasets(self) -> Any:
        if Path("gate").exists():
            Path(f"building-{os.getpid()}").touch()
            while not Path("open").exists():
                time.sleep(0.01)
        return super().datasets()
"""


def start(place: Workplace) -> tuple[Running, dict[int, int]]:
    """A job that is held in its fourth step, and the processes of its two workers."""
    place.task.write_text(TASK_SOURCE + GATED)
    place.write_job(task="task.py:Gated")
    running = place.start("train", "job.yaml", "--workers", "2", "--json", **HELD)
    running.await_event("checkpoint", at_least=2)
    running.await_event("step", at_least=3)
    logs = [await_condition("their logs", lambda: place.log_records(f"worker-{worker}")) for worker in range(2)]  # noqa: B023
    return running, {worker: records[-1]["pid"] for worker, records in enumerate(logs)}


def kill(running: Running, pid: int, worker: int) -> None:
    os.kill(pid, signal.SIGKILL)
    losses = running.workplace.events
    await_condition(
        f"the loss of worker {worker}",
        lambda: any(event["kind"] == "lost" and event["worker"] == worker for event in losses()),
    )


def generations(place: Workplace) -> list[dict[str, Any]]:
    return [event for event in place.events() if event["kind"] == "generation"]


def test_a_replacement_without_state_is_left_alone_and_the_job_goes_on_from_its_checkpoint(
    workplace: Workplace, undisturbed: str
) -> None:
    running, pids = start(workplace)
    (workplace.folder / "gate").touch()
    kill(running, pids[0], 0)
    await_condition("a replacement that is built", lambda: list(workplace.folder.glob("building-*")))
    kill(running, pids[1], 1)
    # The place of worker 1, of which the replacement was to begin from the checkpoint, is no more.
    resized = workplace.start("resize", "last", "--workers", "1").done()
    assert resized.code == 0, resized.stderr
    (workplace.folder / "open").touch()
    workplace.go()
    done = running.done()
    assert done.code == 0, done.stderr
    assert [event["from_step"] for event in generations(workplace)] == [0, 2]
    assert any("looks for the newest checkpoint" in event.get("message", "") for event in workplace.events())
    assert done.document["weights_digest"] == undisturbed
    workplace.assert_nobody_left()


def test_a_job_whose_checkpoints_are_gone_ends_rather_than_begin_again(workplace: Workplace) -> None:
    running, pids = start(workplace)
    for checkpoint in workplace.checkpoints():
        shutil.rmtree(workplace.last / "checkpoints" / checkpoint)
    kill(running, pids[0], 0)
    kill(running, pids[1], 1)
    done = running.done()
    assert done.code == 1
    assert "every worker is lost, and the checkpoint of step 2 can no longer be read" in done.error
    assert "The job ends rather than begin again with step 1." in done.error
    assert "put a checkpoint back into the run and resume it" in done.advice
    assert [event["from_step"] for event in generations(workplace)] == [0]
    workplace.assert_nobody_left()
