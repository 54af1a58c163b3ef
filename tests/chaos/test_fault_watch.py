"""A watch that really stops and kills, in processes of its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from command import await_condition
from quorate.chaos.script import Act, Fault, firings, marker_of, parse_fault
from quorate.chaos.supervisor_hook import FaultInjection
from quorate.chaos.worker_hook import FaultWatch

pytestmark = pytest.mark.faults

LIFE = """
import sys
from pathlib import Path
from quorate.chaos.script import parse_fault
from quorate.chaos.worker_hook import FaultWatch

logs, worker, script, moments = sys.argv[1:]
tell = lambda *moment: print(*moment, flush=True)
watch = FaultWatch([parse_fault(line) for line in script.split(";")], int(worker), range(2), Path(logs), tell)
for moment in moments.split(";"):
    step, phase, *stays = moment.split()
    tell(int(step), phase, None)
    watch.on_phase(int(step), phase)
    if stays:
        sys.stdin.read()
"""
STEPS = "1 data;1 compute;1 exchange;1 apply;2 data;2 compute;2 exchange;2 apply"


def begin(logs: Path, worker: int, script: str, moments: str = STEPS) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LIFE, str(logs), str(worker), script, moments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def live(logs: Path, worker: int, script: str, moments: str = STEPS) -> tuple[int, str]:
    """The exit code of a worker with this script and these moments, and the last that it told.

    It stays for ever in a moment that says so: `2 apply stays`.
    """
    with begin(logs, worker, script, moments) as process:
        try:
            assert process.stdout is not None
            return process.wait(timeout=60), process.stdout.read().strip().split("\n")[-1]
        finally:
            process.kill()


def test_a_worker_dies_at_the_named_moment_and_its_successor_passes_it(tmp_path: Path) -> None:
    script = "kill worker 1 at step 2 in exchange"
    assert live(tmp_path, 0, script)[0] == 0
    assert firings(tmp_path) == []
    assert live(tmp_path, 1, script) == (-signal.SIGKILL, "2 exchange None")
    (firing,) = firings(tmp_path)
    assert (firing.fault, firing.worker, firing.step, firing.phase) == (0, 1, 2, "exchange")
    assert live(tmp_path, 1, script) == (0, "2 apply None")
    assert firings(tmp_path) == [firing]


@pytest.mark.long
@pytest.mark.parametrize("phase", ["exchange", "apply"])
def test_after_a_delay_a_worker_dies_whatever_it_is_doing_then(tmp_path: Path, phase: str) -> None:
    script = "kill worker 1 at step 2 in exchange after 2s"
    moments = f"1 data;2 exchange;2 {phase} stays;3 data"
    assert live(tmp_path, 1, script, moments) == (-signal.SIGKILL, f"2 {phase} None")
    (firing,) = firings(tmp_path)
    assert (firing.fault, firing.worker, firing.step, firing.phase) == (0, 1, 2, phase)
    assert live(tmp_path, 1, script) == (0, "2 apply None")


def test_who_is_done_before_the_delay_is_over_has_not_met_the_fault(tmp_path: Path) -> None:
    assert live(tmp_path, 1, "kill worker 1 at step 2 in exchange after 1min") == (0, "2 apply None")
    assert firings(tmp_path) == []


def test_after_a_delay_a_worker_stops_and_can_be_woken(tmp_path: Path) -> None:
    script = "stop worker 0 at step 2 in exchange after 100ms for 1s"
    with begin(tmp_path, 0, script, "2 exchange stays;2 apply") as sleeper:
        try:
            await_condition("a stopped process", lambda: _state(sleeper.pid) == "T")
            faults = FaultInjection([parse_fault(script)], tmp_path)
            faults.continue_stopped({sleeper.pid}, now=10.0)
            faults.continue_stopped({sleeper.pid}, now=11.0)
            told, _ = sleeper.communicate(timeout=60)  # which also ends its stay
            assert (sleeper.returncode, told) == (0, "2 exchange None\n2 apply None\n")
        finally:
            sleeper.kill()
    (firing,) = firings(tmp_path)
    assert (firing.step, firing.phase) == (2, "exchange")


def test_of_those_who_are_to_die_after_a_delay_nobody_is_given_time_once_somebody_has(tmp_path: Path) -> None:
    script = "kill all at step 2 in apply after 100ms"
    late = FaultWatch([parse_fault(script)], 1, range(2), tmp_path, lambda *_: None)
    late.on_phase(1, "apply")
    assert live(tmp_path, 0, script, "2 apply stays")[0] == -signal.SIGKILL
    killed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "kill", lambda *sent: killed.append(sent))
        late.on_phase(1, "regroup")
        assert killed == [(os.getpid(), signal.SIGKILL)]


def test_whoever_waits_for_somebody_who_is_away_says_so(tmp_path: Path) -> None:
    told: list[tuple[int, str]] = []
    watch = FaultWatch(
        [parse_fault("kill worker 1 at step 1")],
        0,
        range(2),
        tmp_path,
        lambda step, phase, _: told.append((step, phase)),
    )
    looks = iter([False, False, True])
    watch.on_generation({0}, lambda: next(looks))
    watch.on_phase(2, "data")
    assert next(looks, None) is None, "it has waited until it was called"
    # Not a phase of a step, and told again and again: nobody counts as hung, or as slow, who waits on purpose.
    assert told == [*[(2, "wait")] * 3, (2, "data")]
    watch.on_generation({0, 1}, lambda: False)
    watch.on_phase(3, "data")
    assert told[4:] == []


def test_faults_that_are_alike_come_one_after_the_other(tmp_path: Path) -> None:
    script = "kill worker 1 at step 2;kill worker 1 at step 2"
    assert [live(tmp_path, 1, script)[0] for _ in range(3)] == [-signal.SIGKILL, -signal.SIGKILL, 0]
    assert [firing.fault for firing in firings(tmp_path)] == [0, 1]


def test_when_all_are_killed_nobody_lives_on_who_was_there_and_their_successors_do(tmp_path: Path) -> None:
    script = "kill all at step 2 in apply"
    told: list[tuple[int, str]] = []
    faults = [parse_fault(script)]
    survivor = FaultWatch(faults, 1, range(2), tmp_path, lambda step, phase, _: told.append((step, phase)))
    survivor.on_phase(1, "apply")
    assert live(tmp_path, 0, script)[0] == -signal.SIGKILL
    killed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "kill", lambda *sent: killed.append(sent))
        survivor.on_phase(1, "regroup")  # it has lost the other before it came to its own moment
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
        faults = FaultInjection([parse_fault(script)], tmp_path)
        faults.continue_stopped({sleeper.pid + 1}, now=100.0)  # another process has its place
        faults.continue_stopped({sleeper.pid}, now=10.0)
        faults.continue_stopped({sleeper.pid}, now=12.9)
        assert _state(sleeper.pid) == "T"
        faults.continue_stopped({sleeper.pid}, now=13.0)
        told, _ = sleeper.communicate(timeout=60)
        assert sleeper.returncode == 0
        assert told.endswith("2 apply None\n")
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_fault_that_cannot_be_noted_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watch = FaultWatch([Fault(Act.KILL, 0, 1)], 0, range(1), tmp_path / "gone", lambda *_: None)
    watch.on_phase(1, "data")
    assert "fault 0 is left out, since it cannot be noted" in caplog.text


def test_a_marker_that_is_half_written_is_not_counted(tmp_path: Path) -> None:
    marker_of(tmp_path, 0, 0).write_text('{"fault": 0, "wor')
    assert firings(tmp_path) == []


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_slow_worker_lingers_in_its_lanes_from_its_step_on_and_its_successor_does_not(tmp_path: Path) -> None:
    script = [parse_fault("slow worker 1 4x from step 2")]
    watch = FaultWatch(script, 1, range(2), tmp_path, lambda *_: None)
    watch.on_phase(1, "data")
    assert watch.stretch("compute", 0.01) == 0.0
    watch.on_phase(2, "data")
    (firing,) = firings(tmp_path)
    assert (firing.fault, firing.worker, firing.step) == (0, 1, 2)
    assert watch.stretch("compute", 0.01) >= 0.03
    assert watch.stretch("data", 0.01) == 0.0
    watch.on_phase(3, "data")
    assert watch.stretch("compute", 0.01) >= 0.03
    successor = FaultWatch(script, 1, range(2), tmp_path, lambda *_: None)
    successor.on_phase(3, "data")
    assert successor.stretch("compute", 0.01) == 0.0
    other = FaultWatch(script, 0, range(2), tmp_path, lambda *_: None)
    other.on_phase(3, "data")
    assert other.stretch("compute", 0.01) == 0.0
