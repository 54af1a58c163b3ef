"""Processes that are stopped (SIGSTOP) between their start and the first step: each is named and replaced in time."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command import PATIENCE, Done, Running, Workplace, await_condition, parent_of
from quorate.core.processes import children_of

pytestmark = pytest.mark.faults

TIMEOUT = 2.0
KEYS: dict[str, Any] = {"workers": 3, "min_workers": 1, "failure_timeout": TIMEOUT}
PROGRAMS = {
    "the fork server": "quorate.engines.fork_server",
    "the coordinator": "quorate.coordinator",
}
EARLY, LATER = (0.0, 0.02), (0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0)


def seconds_of(delays: tuple[float, ...]) -> list[str]:
    return [f"after {delay * 1000:.0f} ms" for delay in delays]


def program(place: Workplace, running: Running, name: str) -> int | None:
    """The process of that name which the launcher has started."""
    found = (pid for pid in place.pids(PROGRAMS[name]) if parent_of(pid) == running.process.pid)
    return next(found, None)


def stop_new(what: str, find: Callable[[], int | None], delay: float) -> int:
    """Stop a process so many seconds after it appears; its pid. It is stopped, and has not ended before."""
    over = time.monotonic() + PATIENCE
    while (pid := find()) is None:
        assert time.monotonic() < over, f"waited in vain for {what}"
    time.sleep(delay)  # the moment is what is tested
    os.kill(pid, signal.SIGSTOP)
    await_condition(f"{what} to be stopped", lambda: state_of(pid) == "T")
    return pid


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def go_on(place: Workplace, pid: int) -> None:
    """Let the job train once the stop of a process was seen and dealt with: until then it cannot be over."""
    await_condition("the end of the stop", lambda: state_of(pid) != "T")
    place.go()


def assert_goes_on(done: Done, digest: str) -> None:
    assert done.code == 0, done.stderr
    assert done.document["weights_digest"] == digest


def stop_worker(place: Workplace, running: Running, delay: float) -> int:
    """Stop the second worker that is forked."""
    fork_server = await_condition("the fork server", lambda: program(place, running, "the fork server"))

    def second() -> int | None:
        return next(iter(sorted(children_of(fork_server))[1:]), None)

    return stop_new("a worker", second, delay)


def check_stopped_worker(place: Workplace, undisturbed: str, delay: float) -> None:
    place.write_job(**KEYS)
    running = place.start("train", "job.yaml", "--json", HOLD="1")
    pid = stop_worker(place, running, delay)
    go_on(place, pid)
    done = running.done()
    assert_goes_on(done, undisturbed)
    lost = [event["message"] for event in place.events() if event["kind"] == "lost"]
    assert any(f"(pid {pid}" in message for message in lost)
    named = f"(pid {pid}) is stopped (SIGSTOP), and has been for" in done.stderr
    assert named or any(f"(pid {pid} on host" in message and "no heartbeat" in message for message in lost)
    place.assert_nobody_left()


@pytest.mark.parametrize("delay", EARLY, ids=seconds_of(EARLY))
def test_a_worker_stopped_just_after_its_fork_is_replaced(workplace: Workplace, undisturbed: str, delay: float) -> None:
    check_stopped_worker(workplace, undisturbed, delay)


@pytest.mark.long
@pytest.mark.parametrize("delay", LATER, ids=seconds_of(LATER))
def test_a_worker_stopped_in_its_setup_is_replaced(workplace: Workplace, undisturbed: str, delay: float) -> None:
    check_stopped_worker(workplace, undisturbed, delay)


def test_setup_timeout_counts_from_the_fork(workplace: Workplace) -> None:
    workplace.write_job(**KEYS | {"failure_timeout": 600.0, "setup_timeout": 3.0})
    running = workplace.start("train", "job.yaml", "--json")
    pid = stop_worker(workplace, running, 0.0)
    done = running.done()
    assert done.code == 1
    assert f"worker 1 (pid {pid}) is still in its start" in done.stderr
    assert "longer than setup_timeout (3.0)" in done.stderr
    workplace.assert_nobody_left()


def check_stopped_program(place: Workplace, undisturbed: str, name: str, delay: float) -> None:
    place.write_job(**KEYS)
    running = place.start("train", "job.yaml", "--json", HOLD="1")
    pid = stop_new(name, lambda: program(place, running, name), delay)
    go_on(place, pid)
    done = running.done()
    assert_goes_on(done, undisturbed)
    assert f"{name} (pid {pid})" in done.stderr
    assert "SIGSTOP" in done.stderr or "has not answered for" in done.stderr
    place.assert_nobody_left()


@pytest.mark.parametrize("name", PROGRAMS)
def test_who_is_no_worker_and_stopped_at_its_start_is_replaced(
    workplace: Workplace, undisturbed: str, name: str
) -> None:
    check_stopped_program(workplace, undisturbed, name, 0.02)


@pytest.mark.long
@pytest.mark.parametrize("delay", LATER, ids=seconds_of(LATER))
@pytest.mark.parametrize("name", PROGRAMS)
def test_who_is_no_worker_and_stopped_before_the_first_step_is_replaced(
    workplace: Workplace, undisturbed: str, name: str, delay: float
) -> None:
    check_stopped_program(workplace, undisturbed, name, delay)
