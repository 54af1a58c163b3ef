"""Checkpoints under faults, by the real command: writers killed while they save, and disks that fill up or refuse."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command import TASK_SOURCE, Workplace
from quorate.checkpoint.store import CheckpointFolder
from small_disk import small_disk
from trial import REFERENCE, chaos, recovered, told, undisturbed_job

pytestmark = [pytest.mark.faults, pytest.mark.long, pytest.mark.usefixtures("unmeasured")]

STEPS = 18
KEYS: dict[str, Any] = {
    "steps": STEPS,
    "workers": 3,
    "failure_timeout": 2.0,
    "checkpoint": {"every": 3, "keep": 3},
}
# A state of some megabytes: a save takes long enough to be hit in its copy, its writing, and its commit.
SOURCE = TASK_SOURCE.replace(
    "        return nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))\n",
    "        model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))\n"
    "        for number in range(3):\n"
    '            model.register_buffer(f"ballast{number}", torch.zeros(1_000_000))\n'
    "        return model\n",
)
assert SOURCE != TASK_SOURCE
MOMENTS = ("1ms", "5ms", "15ms", "40ms", "80ms")


place = undisturbed_job(SOURCE, **KEYS)


def checkpoints_of(place: Workplace, run: str) -> CheckpointFolder:
    return CheckpointFolder(place.folder / "runs" / run / "checkpoints")


def assert_only_whole_ones(folder: CheckpointFolder) -> None:
    """The last step's is there, all are whole, and nothing else is."""
    search = folder.search()
    assert search.skipped == ()
    assert search.newest is not None
    assert search.newest.cursor.step == STEPS
    for info in folder.list():
        folder.load(info)
    assert [entry.name for entry in folder.folder.iterdir() if not entry.name.startswith("step-")] == []


def assert_saved_later(place: Workplace, document: dict[str, Any], after: int) -> None:
    assert [event for event in told(place, document, "checkpoint") if after < event["step"] < STEPS]


@pytest.mark.parametrize("after", MOMENTS)
def test_writers_killed_while_they_save(place: Workplace, after: str) -> None:
    """The one that commits, and the others, one after the other."""
    faults = [f"kill worker {worker} at step {step} in checkpoint after {after}" for worker, step in ((1, 3), (0, 6))]
    document = recovered(place, *faults)
    assert_saved_later(place, document, 6)
    assert_only_whole_ones(checkpoints_of(place, document["run"]))


@pytest.mark.parametrize("after", MOMENTS)
def test_all_killed_while_they_save(place: Workplace, after: str) -> None:
    document = recovered(place, f"kill all at step 9 in checkpoint after {after}")
    begun = [event["from_step"] for event in told(place, document, "generation")]
    assert begun[0] == 0
    assert begun[1] in (6, 9), "it goes on from the last whole one"
    assert_saved_later(place, document, 9)
    assert_only_whole_ones(checkpoints_of(place, document["run"]))


@pytest.mark.parametrize("after", MOMENTS[:3])  # later than that it may be over
def test_killed_in_the_last_save(place: Workplace, after: str) -> None:
    """Nobody trains any more: it is saved by whoever is left, or comes."""
    document = chaos(place, f"kill worker 0 at step {STEPS} in checkpoint after {after}")
    assert [fault["fired"] for fault in document["faults"]] == [True]
    assert document["same"]
    assert_only_whole_ones(checkpoints_of(place, document["run"]))


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(65536))
        except OSError:
            return


def remount(folder: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], check=True)


TROUBLES: dict[str, tuple[Callable[[Path], object], Callable[[Path], object], str, str]] = {
    "full": (fill, lambda folder: (folder / "filler").unlink(), "No space left on device", "Free some space"),
    "read-only": (
        lambda folder: remount(folder, "ro"),
        lambda folder: remount(folder, "rw"),
        "Read-only file system",
        "Make the folder writable",
    ),
}


def reference_digest(place: Workplace) -> str:
    digest: str = json.loads((place.folder / "runs" / REFERENCE / "result.json").read_text())["weights_digest"]
    return digest


@pytest.mark.parametrize("trouble", list(TROUBLES))
def test_a_disk_that_refuses_for_a_while(place: Workplace, trouble: str) -> None:
    begin, end, reason, remedy = TROUBLES[trouble]
    (place.folder / "go").unlink(missing_ok=True)
    running = place.start("train", "job.yaml", "--json", HOLD="1", PAUSE="0.05")
    running.await_event("generation")
    checkpoints = place.last / "checkpoints"
    with small_disk(checkpoints, "64m"):
        begin(checkpoints)
        place.go()
        failed = running.await_event("checkpoint_failed")
        end(checkpoints)
        saved = running.await_event("checkpoint")
        done = running.done()
        assert done.code == 0, done.stderr
        assert done.document["weights_digest"] == reference_digest(place)
        assert reason in failed["reason"]
        assert remedy in failed["reason"]
        assert saved["step"] < STEPS, "the next one is whole again"
        assert_only_whole_ones(CheckpointFolder(checkpoints))
        place.assert_nobody_left()


def test_a_disk_that_stays_full(place: Workplace) -> None:
    """The job waits for space before it ends, and says so."""
    (place.folder / "go").unlink(missing_ok=True)
    running = place.start("train", "job.yaml", "--json", HOLD="1")
    running.await_event("generation")
    checkpoints = place.last / "checkpoints"
    with small_disk(checkpoints, "64m"):
        fill(checkpoints)
        place.go()
        done = running.done(within=180.0)
        assert done.code == 1, done.stdout
        assert f"cannot save checkpoint step-{STEPS:08d}" in done.error
        assert "No space left on device" in done.error
        assert "Free some space" in done.error
        assert [entry.name for entry in checkpoints.iterdir()] == ["filler"]
        place.assert_nobody_left()
