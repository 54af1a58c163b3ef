"""A watch that really stops and kills, in processes of its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from command import await_condition
from quorate.core.fault import Act, Fault
from quorate.engines.sleepers import Sleepers
from quorate.testing.faults import parse_fault
from quorate.worker.faults import FaultWatch, firings, marker_of

LIFE = """
import sys
from pathlib import Path
from quorate.testing.faults import parse_fault
from quorate.worker.faults import FaultWatch

logs, worker, script, moments = sys.argv[1:]
tell = lambda *moment: print(*moment, flush=True)
watch = FaultWatch([parse_fault(line) for line in script.split(";")], int(worker), 2, Path(logs), tell)
for moment in moments.split(";"):
    step, phase = moment.split()
    watch.tell(int(step), phase)
"""
STEPS = "1 data;1 compute;1 exchange;1 apply;2 data;2 compute;2 exchange;2 apply"


def begin(logs: Path, worker: int, script: str, moments: str = STEPS) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LIFE, str(logs), str(worker), script, moments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def live(logs: Path, worker: int, script: str, moments: str = STEPS) -> tuple[int, str]:
    """The exit code of a worker with this script and these moments, and the last that it told."""
    process = begin(logs, worker, script, moments)
    told, _ = process.communicate(timeout=60)
    return process.returncode, told.strip().split("\n")[-1]


def test_a_worker_dies_at_the_named_moment_and_its_successor_passes_it(tmp_path: Path) -> None:
    script = "kill worker 1 at step 2 in exchange"
    assert live(tmp_path, 0, script)[0] == 0
    assert firings(tmp_path) == []
    assert live(tmp_path, 1, script) == (-signal.SIGKILL, "2 exchange None")
    (firing,) = firings(tmp_path)
    assert (firing.fault, firing.worker, firing.step, firing.phase) == (0, 1, 2, "exchange")
    assert live(tmp_path, 1, script) == (0, "2 apply None")
    assert firings(tmp_path) == [firing]


def test_faults_that_are_alike_come_one_after_the_other(tmp_path: Path) -> None:
    script = "kill worker 1 at step 2;kill worker 1 at step 2"
    assert [live(tmp_path, 1, script)[0] for _ in range(3)] == [-signal.SIGKILL, -signal.SIGKILL, 0]
    assert [firing.fault for firing in firings(tmp_path)] == [0, 1]


def test_when_all_are_killed_nobody_lives_on_who_was_there_and_their_successors_do(tmp_path: Path) -> None:
    script = "kill all at step 2 in apply"
    told: list[tuple[int, str]] = []
    survivor = FaultWatch([parse_fault(script)], 1, 2, tmp_path, lambda step, phase, _: told.append((step, phase)))
    survivor.tell(1, "apply")
    assert live(tmp_path, 0, script)[0] == -signal.SIGKILL
    killed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "kill", lambda *sent: killed.append(sent))
        survivor.tell(1, "regroup")  # it has lost the other before it came to its own moment
    assert killed == [(os.getpid(), signal.SIGKILL)]
    assert [(firing.worker, firing.step, firing.phase) for firing in firings(tmp_path)] == [
        (0, 2, "apply"),
        (1, 1, "regroup"),
    ]
    assert [live(tmp_path, worker, script)[0] for worker in (0, 1)] == [0, 0]


def test_a_stopped_worker_sleeps_for_its_time_and_goes_on(tmp_path: Path) -> None:
    script = "stop worker 0 at step 2 for 3s"
    sleeper = begin(tmp_path, 0, script)
    try:
        await_condition("the marker", lambda: firings(tmp_path))
        await_condition("a stopped process", lambda: _state(sleeper.pid) == "T")
        sleepers = Sleepers([parse_fault(script)], tmp_path)
        sleepers.wake_those_due({0: sleeper.pid + 1}, now=100.0)  # another process has its place
        sleepers.wake_those_due({0: sleeper.pid}, now=10.0)
        sleepers.wake_those_due({0: sleeper.pid}, now=12.9)
        assert _state(sleeper.pid) == "T"
        sleepers.wake_those_due({0: sleeper.pid}, now=13.0)
        told, _ = sleeper.communicate(timeout=60)
        assert sleeper.returncode == 0
        assert told.endswith("2 apply None\n")
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_fault_that_cannot_be_noted_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watch = FaultWatch([Fault(Act.KILL, 0, 1)], 0, 1, tmp_path / "gone", lambda *_: None)
    watch.tell(1, "data")
    assert "`kill worker 0 at step 1` is left out, since it cannot be noted" in caplog.text


def test_a_marker_that_is_half_written_is_not_counted(tmp_path: Path) -> None:
    marker_of(tmp_path, 0, 0).write_text('{"fault": 0, "wor')
    assert firings(tmp_path) == []


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
