"""What is no file, or is very large, in the place of a run's file; by the real command."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from command import Workplace, await_condition
from quorate.checkpoint.manifest import Part
from quorate.checkpoint.verification import MANIFEST, read_manifest

pytestmark = pytest.mark.usefixtures("unmeasured")

ENDLESS = 1 << 40


def put_fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


@pytest.mark.faults
@pytest.mark.parametrize("file", ["1-of-*.safetensors", MANIFEST], ids=["a part", "the manifest"])
def test_a_fifo_in_a_checkpoint_is_damage_and_the_one_before_is_used(used_workplace: Workplace, file: str) -> None:
    names = used_workplace.checkpoints()
    (spoilt,) = (used_workplace.last / "checkpoints" / names[-1]).glob(file)
    put_fifo(spoilt)
    done = used_workplace.run("eval", "last", "--json")
    assert done.code == 0, done.stderr
    assert Path(done.document["checkpoint"]).name == names[-2]
    assert f"{names[-1]} is damaged, so {names[-2]} is used" in done.stderr
    assert "a FIFO is in the place of the file" in done.stderr


@pytest.mark.faults
@pytest.mark.parametrize("file", ["job.yaml", "environment.json", "result.json", "events.jsonl", "created", "lock"])
def test_a_fifo_in_a_run_holds_nobody_up(used_workplace: Workplace, file: str) -> None:
    put_fifo(used_workplace.last / file)
    for command in (["show", "last"], ["runs"]):
        done = used_workplace.start(*command).done(within=30)
        assert done.code in (0, 1, 2), done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "command",
    [["resume", "last", "--steps", "20"], ["eval", "last"], ["checkpoints", "verify", "last"]],
    ids=lambda command: command[0],
)
def test_every_verb_ends_on_sigterm_while_it_reads_a_checkpoint(used_workplace: Workplace, command: list[str]) -> None:
    """A part with a hole of a terabyte takes an hour to read."""
    checkpoints = used_workplace.last / "checkpoints"
    newest = read_manifest(checkpoints / used_workplace.checkpoints()[-1])
    part = Part("1-of-1.safetensors", ENDLESS, newest.parts[0].digest)
    large = checkpoints / "step-00000009"
    large.mkdir()
    (large / MANIFEST).write_text(replace(newest, step=9, phase=0, parts=(part,)).to_json())
    with (large / part.file).open("wb") as file:
        file.truncate(ENDLESS)
    running = used_workplace.start(*command)
    await_condition("it reads the part", lambda: is_open(running.process.pid, large / part.file))
    os.kill(running.process.pid, signal.SIGTERM)
    sent = time.monotonic()
    done = running.done(within=20)
    assert (done.code, done.stderr.strip().splitlines()[-1:]) == (143, ["terminated"])
    assert time.monotonic() - sent < 10
    used_workplace.assert_nobody_left()


def is_open(pid: int, path: Path) -> bool:
    try:
        return any(each.readlink() == path for each in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
