"""Setups that take long: what is told of them, and when one is too long."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorate.core.failure import JobFailed
from quorate.engines import brood
from quorate.engines.brood import Brood
from quorate.engines.messages import STARTED
from quorate.engines.nursery_process import NurseryProcess
from quorate.engines.setup_watch import FORK_SERVER, IMPORTING, SetupWatch
from quorate.storage.run_folder import RunFolder
from quorate.worker.assignment import Assignment
from quorate.worker.status import StatusPage, status_file

ONE = {(0, 4711): "datasets()"}


def told_by(watch: SetupWatch, seconds: int, phases: dict[tuple[int, int], str], since: int = 0) -> dict[int, str]:
    """What is told, by the second."""
    found = {}
    for now in range(since, since + seconds):
        for message in watch.look(float(now), phases):
            assert now not in found
            found[now] = message
    return found


def test_a_setup_that_takes_long_is_told_seldomer_and_seldomer() -> None:
    assert told_by(SetupWatch(), 1300, ONE) == {
        15: "worker 0: still in datasets(), 15 s",
        45: "worker 0: still in datasets(), 45 s",
        135: "worker 0: still in datasets(), 135 s",
        405: "worker 0: still in datasets(), 405 s",
        1215: "worker 0: still in datasets(), 1215 s",
    }


def test_a_setup_is_never_silent_for_more_than_an_hour() -> None:
    watch = SetupWatch()
    told = [now for now in range(0, 100_000, 5) if watch.look(float(now), ONE)]
    assert max(later - earlier for earlier, later in itertools.pairwise(told)) == 3600


def test_workers_in_the_same_phase_are_told_together() -> None:
    phases = {(slot, 4711 + slot): "datasets()" for slot in range(3)} | {(3, 4714): "restore"}
    watch = SetupWatch()
    watch.look(0.0, phases)
    assert watch.look(15.0, phases) == [
        "workers 0, 1, 2: still in datasets(), 15 s",
        "worker 3: still in the loading of its checkpoint, 15 s",
    ]
    assert watch.look(15.5, phases) == []


def test_the_next_phase_has_its_time_again() -> None:
    watch = SetupWatch()
    assert told_by(watch, 14, {(0, 4711): "model()"}) == {}
    assert told_by(watch, 20, ONE, since=14) == {29: "worker 0: still in datasets(), 15 s"}


def test_another_process_in_the_same_place_is_another_setup() -> None:
    watch = SetupWatch(limit=20.0)
    told_by(watch, 14, ONE)
    assert told_by(watch, 14, {(0, 4712): "datasets()"}, since=14) == {}
    assert watch.overdue(27.0) == []


def test_the_fork_server_is_named_while_it_imports_the_task() -> None:
    told = told_by(SetupWatch(), 16, {(FORK_SERVER, 0): IMPORTING})
    assert list(told.values()) == ["the fork server: still in the import of torch and the task, 15 s"]


def test_too_long_is_what_the_user_says_whatever_the_phases() -> None:
    watch = SetupWatch(limit=60.0)
    watch.look(0.0, {(0, 4711): "model()"})
    watch.look(50.0, ONE)
    assert watch.overdue(59.9) == []
    (setup,) = watch.overdue(60.0)
    assert setup.overdue(60.0, 60.0) == (
        "worker 0 (pid 4711) is still in datasets(), 60 s after its start. That is longer than setup_timeout (60.0)"
    )
    watch.look(70.0, {})  # it has registered
    assert watch.overdue(70.0) == []


@given(st.floats(0, 1e6))
def test_without_a_limit_nothing_takes_too_long(now: float) -> None:
    watch = SetupWatch()
    watch.look(0.0, ONE)
    assert watch.overdue(now) == []


class Nursery:
    """Starts nobody, and says that it has."""

    def __init__(self) -> None:
        self.started = 0
        self.killed: list[int] = []

    def start(self, assignment: Assignment) -> None:
        self.started += 1

    def poll(self, seconds: float) -> Iterator[dict[str, Any]]:
        for _ in range(self.started):
            yield {"what": STARTED, "slot": 1, "pid": 4711, "how": "forked", "reason": ""}
        self.started = 0

    def kill(self, pid: int) -> None:
        self.killed.append(pid)


@pytest.mark.parametrize("is_replacement", [False, True])
def test_only_before_anybody_trains_does_a_setup_that_takes_too_long_end_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_replacement: bool
) -> None:
    monkeypatch.setattr(brood, "SETUP_GLANCE", 0.0)
    run, nursery = RunFolder(tmp_path), Nursery()
    told: list[str] = []
    run.logs.mkdir()
    place = Brood(
        run,
        lambda: cast(NurseryProcess, nursery),
        lambda *_: cast(Assignment, None),
        tell=told.append,
        setup_timeout=1e-9,
    )
    place.start(1, None, is_replacement=is_replacement)
    place.look(0.0)
    page = StatusPage(status_file(run, 1))
    page.write_setup("initial_weights()")
    if not is_replacement:
        with pytest.raises(JobFailed, match=r"worker 1 \(pid 4711\) is still in initial_weights\(\).*Raise setup_time"):
            place.look(0.0)
        return
    for _ in range(3):
        place.look(0.0)
    assert nursery.killed == [4711]
    (message,) = told
    assert message.endswith("longer than setup_timeout (1e-09): it is ended, and another is started.")
    page.write(0, "wait")  # it has registered
    place.look(0.0)
    assert len(told) == 1
