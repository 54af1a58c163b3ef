"""Setups that take long: what is told of them, and when one is too long."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory_engine import MemoryEngine
from quorate.core.failure import JobFailed
from quorate.supervisor import worker_processes
from quorate.supervisor.worker_processes import FORK_SERVER, IMPORTING, SetupWatch, WorkerProcesses
from quorate.worker.assignment import Assignment

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


class Places:
    """The workers' processes, of which nobody is allowed any time for its setup."""

    def __init__(self) -> None:
        self.engine = MemoryEngine()
        self.told: list[str] = []
        self.has_formed = False
        self.worker_processes = WorkerProcesses(
            self.engine,
            lambda slot, *_: Assignment("", slot, 1, "t:T", {}, "", "127.0.0.1:1", "token"),
            notify=self.told.append,
            setup_timeout=1e-9,
            has_formed=lambda: self.has_formed,
        )

    def start(self, slot: int, *, is_replacement: bool = False) -> None:
        self.worker_processes.start(slot, None, is_replacement=is_replacement)

    def look(self, times: int = 3) -> None:
        for _ in range(times):
            self.worker_processes.look(0.0)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Places:
    monkeypatch.setattr(worker_processes, "SETUP_GLANCE", 0.0)
    return Places()


@pytest.mark.parametrize("is_replacement", [False, True])
def test_before_the_first_generation_a_setup_that_takes_too_long_ends_the_job(
    workers: Places, is_replacement: bool
) -> None:
    workers.start(1, is_replacement=is_replacement)
    with pytest.raises(JobFailed, match=r"worker 1 \(pid 4710\) is still in model\(\).*Raise setup_timeout"):
        workers.look()


@pytest.mark.parametrize("is_replacement", [False, True], ids=["a spare", "a replacement"])
def test_while_others_may_train_a_setup_that_takes_too_long_is_begun_again(
    workers: Places, is_replacement: bool
) -> None:
    workers.has_formed = True
    workers.start(1, is_replacement=is_replacement)
    workers.look()
    assert workers.engine.killed == [4710]
    (message,) = workers.told
    assert message.endswith("longer than setup_timeout (1e-09): it is ended, and another is started.")
    assert workers.worker_processes.processes() == {(1, 4710)}, "until its exit is reported"


def test_one_that_has_no_process_yet_is_not_ended_while_another_runs(workers: Places) -> None:
    workers.has_formed = True
    workers.engine.sets_up = False
    workers.start(1)
    workers.look()
    workers.engine.is_importing = True
    workers.start(2, is_replacement=True)
    workers.look()
    assert (workers.engine.killed, workers.told) == ([], [])


def test_another_fork_server_that_does_not_come_to_its_end_with_the_import_ends_the_job(workers: Places) -> None:
    workers.has_formed = True
    workers.engine.is_importing = True
    workers.start(1, is_replacement=True)
    with pytest.raises(JobFailed, match="worker 1 is still in the import of torch and the task"):
        workers.look()
