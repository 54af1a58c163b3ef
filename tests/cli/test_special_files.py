"""What is no file, or is very large, in the place of a run's file; by the real command."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from command import Workplace, await_condition
from quorate.checkpoint.listing import read_manifest
from quorate.checkpoint.manifest import MANIFEST, Part

pytestmark = pytest.mark.usefixtures("unmeasured")

ENDLESS = 1 << 40


def put_fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


@pytest.mark.faults
def test_fifos_in_checkpoints_are_damage_and_the_one_before_is_used(used_workplace: Workplace) -> None:
    names, folder = used_workplace.checkpoints(), used_workplace.last / "checkpoints"
    put_fifo(folder / names[-1] / MANIFEST)
    put_fifo(next((folder / names[-2]).glob("1-of-*.safetensors")))
    done = used_workplace.run("eval", "last", "--json")
    assert done.code == 0, done.stderr
    assert Path(done.document["checkpoint"]).name == names[-3]
    assert done.stderr.count("a FIFO is in the place of the file") == 2


@pytest.mark.parametrize(
    "command", [["resume", "last", "--steps", "20"], ["eval", "last"]], ids=lambda command: command[0]
)
def test_sigterm_ends_a_command_that_reads_a_checkpoint(used_workplace: Workplace, command: list[str]) -> None:
    """A part with a hole of a terabyte takes an hour to read."""
    checkpoints = used_workplace.last / "checkpoints"
    newest = read_manifest(checkpoints / used_workplace.checkpoints()[-1])
    part = Part(newest.parts[0].file, ENDLESS, newest.parts[0].digest)
    large = checkpoints / "step-00000009"
    large.mkdir()
    (large / MANIFEST).write_text(replace(newest, step=9, phase=0, parts=(part,)).to_json())
    with (large / part.file).open("wb") as file:
        file.truncate(ENDLESS)
    running = used_workplace.start(*command)
    await_condition("it reads the part", lambda: is_open(running.process.pid, large / part.file))
    os.kill(running.process.pid, signal.SIGTERM)
    done = running.done()
    assert (done.code, done.stderr.strip().splitlines()[-1:]) == (143, ["terminated"])
    used_workplace.assert_nobody_left()


def is_open(pid: int, path: Path) -> bool:
    try:
        return any(each.readlink() == path for each in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
