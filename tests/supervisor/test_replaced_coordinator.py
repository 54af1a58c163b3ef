"""Whoever takes the place of a dead coordinator gets the time that a program needs to begin, on a busy machine too."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory_engine import MemoryEngine
from quorate.core import timing
from quorate.core.errors import JobError, RequestError
from quorate.core.timing import LEAST_START, LONGEST_START, MOST_STARTS, Timing
from quorate.engines.engine import Engine
from quorate.storage.run_folder import RunFolder
from quorate.supervisor import coordinator_process
from quorate.supervisor.coordinator_process import MOST_DEATHS, CoordinatorProcess

TOKEN = "word"
HASTY = 0.01
"""Seconds in which no interpreter has begun."""
TIMING = Timing(5.0)


@given(st.floats(0.1, 1000.0), st.integers(0, 20), st.floats(0.0, 1000.0))
def test_a_start_may_take_longer_after_each_that_took_too_long_and_where_the_last_took_long(
    failure_timeout: float, tries: int, last: float
) -> None:
    timing = Timing(failure_timeout)
    limit = timing.coordinator_start(tries, last)
    assert max(failure_timeout, LEAST_START) <= limit <= max(failure_timeout, LONGEST_START)
    assert limit >= min(2 * last, LONGEST_START)
    longer = timing.coordinator_start(tries + 1, last)
    assert longer == 2 * limit or longer == max(failure_timeout, LONGEST_START)
    assert timing.coordinator_start(tries, last + 1.0) >= limit
    assert sum(timing.coordinator_start(tried, last) for tried in range(MOST_STARTS)) <= timing.absence * (1 + 1e-9)
    assert timing.absence >= timing.storm


@pytest.fixture
def coordinator(cold: None, tmp_path: Path) -> Iterator[CoordinatorProcess]:
    run = RunFolder(tmp_path)
    run.logs.mkdir()
    appointment = {
        "run": str(run.path),
        "lanes": 1,
        "workers": 1,
        "min_workers": 1,
        "failure_timeout": HASTY,
        "token": TOKEN,
        "port": 0,
        "log_level": "info",
    }
    coordinator = CoordinatorProcess(MemoryEngine(), appointment, TOKEN, Timing(HASTY))
    yield coordinator
    coordinator.close()


def test_the_next_one_listens_at_last_however_slow_the_machine_is(
    coordinator: CoordinatorProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(timing, "LEAST_START", HASTY)
    monkeypatch.setattr(timing, "_TIMES_THE_LAST", 0)
    monkeypatch.setattr(timing, "LONGEST_START", 1e6)
    monkeypatch.setattr(coordinator_process, "MOST_STARTS", 20)
    coordinator.open()
    coordinator.kill()
    has_begun = False
    while not has_begun:
        assert coordinator.is_alive or coordinator.replace({})
        coordinator.look(time.monotonic())
        has_begun = coordinator.listens
    assert "did not listen within" in caplog.text
    assert "and the launcher ended it; another takes its place" in caplog.text


class Child:
    """A coordinator whose start and end are as the test says."""

    def __init__(self, pid: int, appointment: Mapping[str, Any]) -> None:
        self.pid = pid
        self.appointment = appointment
        self.is_alive = True
        self.answer: dict[str, Any] | Exception = {}

    def await_answer(self, limit: float | None = None) -> dict[str, Any]:
        assert limit is not None
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    @property
    def departure(self) -> str:
        return f"the coordinator (pid {self.pid}) was killed by SIGKILL"

    def kill(self) -> None:
        self.is_alive = False

    def close(self, patience: float) -> None:
        self.is_alive = False


class Launcher:
    """Starts such coordinators, and has a clock of its own."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.children: list[Child] = []
        self.process = CoordinatorProcess(cast(Engine, self), {"port": 0}, TOKEN, TIMING, clock=lambda: self.time)

    def start_coordinator(self, appointment: Mapping[str, Any]) -> Child:
        self.children.append(Child(len(self.children) + 1, appointment))
        return self.children[-1]

    def listen(self) -> None:
        self.children[-1].answer = {"address": "127.0.0.1:5000"}

    def pass_time(self, seconds: float) -> None:
        """So many seconds, in which the launcher looks every now and then."""
        over = self.time + seconds
        while self.time < over:
            self.time = min(over, self.time + 0.5)
            self.process.look(answered=0.0)

    def die(self) -> bool:
        self.children[-1].kill()
        return self.process.replace({"workers": 3})

    def end_slow(self) -> float:
        """Seconds after which one that does not come to listen was ended."""
        began = self.time
        while self.children[-1].is_alive:
            assert self.time - began < 10_000, "it has no clock"
            self.pass_time(0.5)
        return self.time - began


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    launcher.listen()
    launcher.process.open()
    yield launcher
    launcher.process.close()


def test_each_that_is_too_slow_is_followed_by_one_with_more_time_and_the_message_says_who_ended_it(
    launcher: Launcher,
) -> None:
    assert launcher.die()
    ended = []
    while True:
        ended.append(launcher.end_slow())
        if not launcher.process.replace({}):
            break
    expected = [TIMING.coordinator_start(tries) for tries in range(MOST_STARTS)]
    assert ended == pytest.approx(expected, abs=0.6)
    last = len(launcher.children)
    assert launcher.process.departure.startswith(
        f"the coordinator (pid {last}) did not listen within {LONGEST_START:.0f}"
    )
    assert launcher.process.departure.endswith("s of its start, and the launcher ended it")


def test_what_the_last_start_took_counts_for_the_next(launcher: Launcher) -> None:
    assert launcher.die()
    launcher.pass_time(9.0)
    launcher.listen()
    launcher.process.look(0.0)
    assert launcher.process.listens
    assert launcher.die()
    assert launcher.end_slow() == pytest.approx(TIMING.coordinator_start(0, last=9.0), abs=0.6)


def test_those_that_die_by_themselves_count_apart_from_those_that_were_ended(launcher: Launcher) -> None:
    for _ in range(MOST_DEATHS):
        assert launcher.die()
    for _ in range(MOST_STARTS - 1):
        launcher.end_slow()
        assert launcher.process.replace({})
    launcher.process.note_step()
    for _ in range(MOST_DEATHS):
        assert launcher.die()
    assert not launcher.die()
    assert launcher.process.departure.endswith("was killed by SIGKILL")


def test_one_that_answers_no_more_is_ended_and_the_next_may_be_silent_for_longer(launcher: Launcher) -> None:
    assert launcher.end_slow() == pytest.approx(TIMING.failure_timeout, abs=0.6)
    assert launcher.process.replace({})
    launcher.listen()
    launcher.process.look(0.0)
    assert launcher.process.departure.endswith("s, and the launcher ended it")
    assert launcher.end_slow() == pytest.approx(2 * TIMING.failure_timeout, abs=0.6)


def test_nobody_is_ended_for_a_pause_of_the_launcher(launcher: Launcher) -> None:
    for is_listening in (True, False):
        assert launcher.die()
        if is_listening:
            launcher.listen()
            launcher.process.look(0.0)
        launcher.time += 3600.0
        launcher.process.look(0.0)
        assert launcher.process.is_alive


@pytest.mark.parametrize("is_listening", [True, False])
def test_a_launcher_that_looks_seldom_ends_who_hangs_too(launcher: Launcher, is_listening: bool) -> None:
    assert launcher.die()
    if is_listening:
        launcher.listen()
        launcher.process.look(0.0)
    limit = TIMING.failure_timeout if is_listening else TIMING.coordinator_start(0)
    for _ in range(3):
        assert launcher.process.is_alive
        launcher.time += 0.6 * limit
        launcher.process.look(0.0)
    assert not launcher.process.is_alive


def test_one_that_answers_now_and_then_is_not_ended(launcher: Launcher) -> None:
    for _ in range(20):
        launcher.pass_time(0.8 * TIMING.failure_timeout)
        launcher.process.look(answered=launcher.time)
    assert launcher.process.is_alive


def test_one_that_waits_for_its_host_has_no_clock_before_it_is_started() -> None:
    launcher, looks = Launcher(), 0
    first = launcher.children[0]
    first.pid = 0

    def give_up() -> bool:
        nonlocal looks
        looks += 1
        launcher.time += 10.0
        if looks == 1000:
            assert launcher.children == [first]
            assert first.is_alive
            first.pid = 1
        return not first.is_alive

    assert launcher.process.open(give_up) is None
    assert 1000 + LONGEST_START / 10 <= looks <= 1002 + LONGEST_START / 10


def test_the_next_is_told_the_port_of_the_last_and_who_is_there(launcher: Launcher) -> None:
    assert launcher.die()
    assert launcher.children[-1].appointment == {"port": 5000, "workers": 3}


class Failing(Launcher):
    """The first coordinators end before they listen."""

    def __init__(self, times: int) -> None:
        self.times = times
        super().__init__()

    def start_coordinator(self, appointment: Mapping[str, Any]) -> Child:
        child = super().start_coordinator(appointment)
        self.listen()
        if len(self.children) <= self.times:
            child.answer = JobError(f"coordinator {child.pid} was killed before it listened")
        return child


def test_the_first_is_followed_by_another_too() -> None:
    launcher = Failing(times=1)
    launcher.process.open()
    assert launcher.process.listens
    assert launcher.children[-1].appointment == {"port": 0}
    launcher.process.close()
    with pytest.raises(JobError, match=f"coordinator {MOST_DEATHS + 1} was killed before it listened"):
        Failing(times=100).process.open()


def test_what_is_wrong_with_the_first_ones_appointment_is_told_at_once() -> None:
    launcher = Launcher()
    launcher.children[0].answer = RequestError("the port is in use")
    with pytest.raises(RequestError, match="the port is in use"):
        launcher.process.open()
    assert len(launcher.children) == 1
