"""Who fills which place, on an engine in memory: no process is started, and nobody waits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from memory_engine import MemoryEngine
from quorate.coordinator.client import SupervisorClient
from quorate.coordinator.places import News, Vacancy
from quorate.core.errors import JobError, LinkError, RequestError
from quorate.core.failure import Failure, JobFailed
from quorate.engines.engine import Prepared
from quorate.supervisor.worker_processes import MOST_INTERRUPTIONS, EngineLost, WorkerProcesses
from quorate.worker.assignment import Assignment

CHECKPOINT = Path("step-00000004")


class Client:
    """Takes reports; the first ones get lost."""

    def __init__(self, lost: int = 0) -> None:
        self._lost = lost
        self.exits: list[tuple[int, int, int | None, int | None]] = []

    def report_exit(self, slot: int, pid: int, *, exit_code: int | None, signal: int | None, **_: Any) -> None:
        if self._lost:
            self._lost -= 1
            raise LinkError("the coordinator does not answer")
        self.exits.append((slot, pid, exit_code, signal))


class Job:
    """Two workers on an engine in memory."""

    def __init__(self, engine: MemoryEngine) -> None:
        self.engine = engine
        self.assigned: list[tuple[int, Path | None, bool]] = []
        self.workers = WorkerProcesses(engine, self._assign)

    def _assign(self, slot: int, checkpoint: Path | None, is_replacement: bool) -> Assignment:
        self.assigned.append((slot, checkpoint, is_replacement))
        return Assignment("", slot, 2, "t:T", {}, "", "127.0.0.1:1", "token")

    def begin(self) -> None:
        for slot in range(2):
            self.workers.start(slot, None)
        self.workers.look(0.0)

    def report(self, client: Client) -> None:
        self.workers.report(cast(SupervisorClient, client))


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job(MemoryEngine())
    job.begin()
    yield job
    job.engine.close()


def test_an_exit_is_reported_until_it_is_answered_and_its_place_is_filled_when_the_coordinator_says_so(
    job: Job,
) -> None:
    job.engine.exit(1, 7)
    job.workers.look(0.0)
    client = Client(lost=1)
    job.report(client)
    assert job.workers.processes() == {(0, 4710), (1, 4711)}, "as long as the coordinator does not know"
    job.report(client)
    assert client.exits == [(1, 4711, 7, None)]
    assert job.workers.processes() == {(0, 4710)}
    news = News(None, vacant={1: Vacancy(0.0, restore=True)})
    for _ in range(2):  # told again before it was done
        job.workers.handle(news)
    assert job.workers.processes() == {(0, 4710), (1, 0)}
    job.workers.refill(lambda: CHECKPOINT)
    job.workers.handle(news)
    job.workers.refill(lambda: CHECKPOINT)
    job.workers.look(0.0)
    assert job.assigned == [(0, None, False), (1, None, False), (1, CHECKPOINT, True)]
    assert job.workers.running == {0: 4710, 1: 4712}


def test_a_place_is_filled_when_its_time_has_come_and_not_from_a_checkpoint_where_others_hold_the_state(
    job: Job,
) -> None:
    job.workers.handle(News(None, vacant={2: Vacancy(60.0, restore=True), 3: Vacancy(0.0, restore=False)}))
    job.workers.refill(lambda: CHECKPOINT)
    assert job.assigned[2:] == [(3, None, True)]


def test_who_counts_as_lost_is_killed_once_and_its_successor_is_not(job: Job) -> None:
    for _ in range(2):
        job.workers.handle(News(None, expelled=((1, 4711), (0, 4999))))
    assert job.engine.killed == [4711]
    job.workers.look(0.0)
    client = Client()
    job.report(client)
    assert client.exits == [(1, 4711, None, 9)]


def test_the_next_coordinator_is_told_who_has_been_known_and_who_is_on_the_way(job: Job) -> None:
    assert job.workers.roster() == {"present": [], "awaited": [0, 1]}
    job.engine.sets_up = False
    job.workers.start(2, None)
    job.workers.look(0.0)
    job.engine.exit(0, 1)
    assert job.workers.roster() == {"present": [(0, 4710), (2, 4712)], "awaited": [1]}


def test_an_engine_that_fails_again_and_again_without_a_step_ends_the_job(job: Job) -> None:
    for _ in range(MOST_INTERRUPTIONS):
        job.engine.interrupt()
        job.workers.look(0.0)
    job.workers.note_step()
    for _ in range(MOST_INTERRUPTIONS):
        job.engine.interrupt()
        job.workers.look(0.0)
    job.engine.interrupt()
    with pytest.raises(EngineLost, match="the memory was lost"):
        job.workers.look(0.0)


def test_before_it_is_ready_what_is_wrong_with_an_engine_or_a_task_is_raised_as_it_is() -> None:
    failure = Failure("TaskError", "there is no such task", exit_code=2)
    with pytest.raises(RequestError, match="no such task"):
        Job(MemoryEngine(failure)).workers.await_ready(lambda: False)
    engine = MemoryEngine()
    assert Job(engine).workers.await_ready(lambda: False) == Prepared({}, None)
    assert Job(engine).workers.await_ready(lambda: True) is None
    engine.interrupt()
    with pytest.raises(JobError, match="the memory was lost"):
        Job(engine).workers.await_ready(lambda: False)


@pytest.mark.parametrize("has_formed", [True, False], ids=["formed", "not formed"])
def test_setup_timeout_counts_for_one_that_can_say_nothing_too_as_long_as_nobody_trains(has_formed: bool) -> None:
    """As on a full disk."""
    now, engine = 0.0, MemoryEngine()
    workers = WorkerProcesses(
        engine, setup_timeout=60.0, assign=Job(engine)._assign, has_formed=lambda: has_formed, clock=lambda: now
    )
    workers.start(0, None)
    (_, started, _), engine._notices = engine.poll(0.0), []
    engine._notices.append(started)
    workers.look(0.0)
    now = 61.0
    if has_formed:
        workers.look(0.0)
        assert engine.killed == []
    else:
        with pytest.raises(JobFailed, match=r"worker 0 \(pid 4710\) is still in its start, 61 s after its start"):
            workers.look(0.0)


def test_a_task_that_cannot_be_imported_any_more_ends_the_job(job: Job) -> None:
    job.engine.fail(Failure("TaskError", "the file is gone"))
    with pytest.raises(JobFailed, match="the file is gone"):
        job.workers.look(0.0)


def test_at_the_end_it_is_waited_for_those_who_leave(job: Job) -> None:
    job.engine.exit(0, 0)
    job.workers.let_leave(0.1, lambda: False)
    assert list(job.workers.running) == [1]
    job.engine.exit(1, 0)
    job.workers.let_leave(60.0, lambda: False)
    assert not job.workers.running
