"""What becomes of workers and of the coordinator when hosts come and go."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from command import PATIENCE, await_condition
from memory_cluster import MemoryCluster, MemoryRoom
from memory_engine import MemoryEngine
from quorate.core.addresses import Network
from quorate.core.errors import QuorateError, RequestError
from quorate.core.failure import Failure, JobFailed
from quorate.core.generation import ENDED_WITH_ITS_GROUP, LOST_WITH_ITS_HOST
from quorate.engines.engine import Exited, Notice, Preparation, Ready, Remark, Started, Unprepared
from quorate.engines.output_pump import OpenLog
from quorate.engines.ray import places
from quorate.engines.ray.engine import ClusterEngine
from quorate.engines.ray.host import EngineMaker
from quorate.engines.ray.hosts import ClusterFailed, ClusterView, GroupLost, HostLost
from quorate.engines.ray.places import ClusterSettings
from quorate.storage.run_folder import RunFolder
from quorate.worker.assignment import Assignment

PREPARATION = Preparation("t:T", {}, "", [], 0, 1, True)


class NumberedEngine(MemoryEngine):
    """Its processes have other numbers than those of the other hosts."""

    made = 0

    def __init__(self, run: RunFolder, preparation: Preparation, network: Network, open_log: OpenLog) -> None:
        super().__init__()
        NumberedEngine.made += 1
        self._pids = 100 * NumberedEngine.made


@dataclass
class Job:
    engine: ClusterEngine
    cluster: MemoryCluster
    run: RunFolder
    notices: list[Notice] = field(default_factory=list)
    nodes: dict[int, str] = field(default_factory=dict)

    def until(self, kind: type[Any], fits: Callable[[Any], bool] = lambda _: True) -> Any:
        def look() -> Notice | None:
            self.notices += self.engine.poll(0.02)
            found = next((one for one in self.notices if isinstance(one, kind) and fits(one)), None)
            if found is not None:
                self.notices.remove(found)
            return found

        return await_condition(f"{kind}", look)

    def start(self, slot: int) -> Started:
        self.engine.start(Assignment(str(self.run.path), slot, 2, "t", {"params": {}}, "", "127.0.0.1:1", "token"))
        started: Started = self.until(Started, lambda one: one.slot == slot)
        self.nodes[slot] = started.how.partition("address-of-")[2].partition(" ")[0]
        return started

    def await_condition(self, what: str, is_so: Callable[[], Any]) -> Any:
        """Wait until something is so that the engine has to do."""

        def look() -> Any:
            self.notices += self.engine.poll(0.02)
            return is_so()

        return await_condition(what, look)

    def appointment(self) -> dict[str, Any]:
        return {"run": str(self.run.path), "lanes": 1, "workers": 1, "failure_timeout": 1.0, "token": "word"}


@contextlib.contextmanager
def job_on(
    folder: Path,
    free: dict[str, int],
    kind: type[MemoryCluster] = MemoryCluster,
    home: str = "",
    make_engine: EngineMaker = NumberedEngine,
    **settings: Any,
) -> Iterator[Job]:
    run = RunFolder(folder)
    run.logs.mkdir()
    cluster = kind(free, make_engine, home)
    engine = ClusterEngine(run, PREPARATION, cluster, ClusterSettings(**settings))
    job = Job(engine, cluster, run)
    try:
        yield job
    finally:
        engine.close()
        assert cluster.is_closed


def test_workers_of_a_lost_host_have_exited_and_their_places_are_filled_elsewhere(tmp_path: Path) -> None:
    with job_on(tmp_path, {"a": 2, "b": 2}, workers=2) as job:
        job.until(Ready)
        pids = {slot: job.start(slot).pid for slot in (0, 1)}
        assert set(job.nodes.values()) == {"a", "b"}, "they are spread"
        lost = job.nodes[1]
        job.cluster.lose(lost)
        assert f"address-of-{lost}" in job.until(Remark).message
        exited = job.until(Exited)
        assert (exited.slot, exited.pid, exited.code) == (1, pids[1], LOST_WITH_ITS_HOST)
        assert job.start(1).pid not in pids.values()
        assert job.nodes[1] == job.nodes[0]
        assert not [one for one in job.notices if isinstance(one, Exited)], "nobody else is told to be gone"


def test_who_finds_no_room_waits_which_is_said_once_and_uses_a_node_that_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job_on(tmp_path, {"a": 1}, workers=2) as job:
        job.until(Ready)
        job.start(0)
        monkeypatch.setattr(places, "SAY_WAITING", 0.05)
        job.engine.start(Assignment("", 1, 2, "t", {"params": {}}, "", "127.0.0.1:1", "token"))
        waiting = (
            "worker 1 waits for {CPU: 1}: free in the cluster is address-of-a: nothing. The others train meanwhile."
        )
        assert job.until(Remark).message == waiting
        job.cluster.free["b"] = 1
        assert job.until(Started).slot == 1
        assert "b" in job.cluster.links
        assert not [one for one in job.notices if isinstance(one, Remark)]


def test_a_worker_is_told_which_gpus_are_its_own(tmp_path: Path) -> None:
    """By its place among all workers, two of one node could have the same, or one that was given to another job."""
    told: list[str] = []

    class Listening(NumberedEngine):
        def start(self, assignment: Assignment) -> None:
            told.append(assignment.gpus)
            super().start(assignment)

    with job_on(tmp_path, {"a": 1, "b": 1}, make_engine=Listening, workers=2) as job:
        job.cluster.gpus_of = {"a": "3", "b": "GPU-f00d"}
        job.until(Ready)
        for slot in (0, 1):
            job.start(slot)
        assert sorted(told) == ["3", "GPU-f00d"]


def test_a_worker_that_ended_on_a_living_host_is_followed_by_another_in_its_room(tmp_path: Path) -> None:
    with job_on(tmp_path, {"a": 1}) as job:
        job.until(Ready)
        first = job.start(0)
        job.engine.kill(0, first.pid)
        job.until(Exited)
        assert job.cluster.free["a"] == 0, "the room is kept"
        assert job.start(0).pid != first.pid


def test_the_room_of_one_who_left_for_good_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "KEEP_ROOM", 0.05)
    with job_on(tmp_path, {"a": 1}) as job:
        job.until(Ready)
        job.engine.kill(0, job.start(0).pid)
        job.until(Exited)
        job.await_condition("its room to be free", lambda: job.cluster.free["a"] == 1)


def test_with_strict_spread_no_node_has_two_also_when_one_is_lost(tmp_path: Path) -> None:
    with job_on(tmp_path, {"a": 4, "b": 4, "c": 4}, workers=2, placement="strict_spread") as job:
        job.until(Ready)
        for slot in (0, 1):
            job.start(slot)
        job.cluster.lose(job.nodes[0])
        job.until(Exited)
        job.start(0)
        assert len({job.nodes[0], job.nodes[1]}) == 2


def prepared(cluster: MemoryCluster) -> int:
    """How many hosts were told to import the task."""
    return sum("prepare" in link.told for link in list(cluster.links.values()))


def test_the_task_is_imported_at_once_where_workers_will_be_and_ready_is_told_once(tmp_path: Path) -> None:
    with job_on(tmp_path, {"a": 1, "b": 1, "c": 1}, workers=3) as job:
        job.until(Ready)
        job.await_condition("all three to be told", lambda: prepared(job.cluster) == 3)
        assert sum(job.cluster.free.values()) == 3, "before a place is taken"
        for slot in range(3):
            job.start(slot)
        assert not [one for one in job.notices if isinstance(one, Ready)]


def test_the_coordinator_is_beside_the_launcher_and_outlives_hosts_and_workers(tmp_path: Path) -> None:
    with job_on(tmp_path, {"a": 1, "b": 1}, home="b") as job:
        child = job.engine.start_coordinator(job.appointment())
        assert child.await_answer(PATIENCE)["address"].startswith("127.0.0.1:")
        job.until(Ready)
        job.start(0)
        job.cluster.lose(job.nodes[0])
        job.until(Exited)
        job.engine.close()
        assert child.is_alive and job.cluster.is_closed
        child.close(PATIENCE)


def test_workers_of_a_host_whose_agent_has_failed_have_exited(tmp_path: Path) -> None:
    with job_on(tmp_path, {"a": 1, "b": 1}) as job:
        job.until(Ready)
        pid = job.start(0).pid
        first = job.nodes[0]
        job.cluster.links[first].agent._commands.put(lambda: 1 / 0)  # type: ignore[arg-type]
        assert "ZeroDivisionError" in job.until(Remark).message
        assert job.until(Exited).pid == pid
        job.start(0)
        assert job.nodes[0] != first


def test_a_worker_whose_host_is_lost_before_it_started_is_started_elsewhere(tmp_path: Path) -> None:
    with job_on(tmp_path, {"a": 1, "b": 1}) as job:
        job.until(Ready)
        (first,) = job.cluster.links
        engine = job.cluster.links[first].agent._engine
        assert isinstance(engine, MemoryEngine)
        engine.is_importing = True
        job.engine.start(Assignment("", 0, 1, "t", {"params": {}}, "", "127.0.0.1:1", "token"))
        job.await_condition("the command", lambda: "start" in job.cluster.links[first].told)
        job.cluster.lose(first)
        assert f"address-of-{first}" not in job.until(Started).how
        assert not [one for one in job.notices if isinstance(one, Exited)]


class Failing(MemoryCluster):
    """Rooms cannot be asked for."""

    asked = 0

    def ask_room(self, node: str | None, avoid: frozenset[str]) -> MemoryRoom:
        self.asked += 1
        if self.asked <= 3:
            raise ValueError("the cluster is being updated")
        return super().ask_room(node, avoid)


def test_a_cluster_that_fails_for_a_while_is_complained_about_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "ASK_AGAIN", 0.01)
    with job_on(tmp_path, {"a": 1}, Failing) as job:
        job.until(Ready)
        job.start(0)
        assert "is being updated" in job.until(Remark).message
        assert not [one for one in job.notices if isinstance(one, Remark)]


class Exhausted(MemoryCluster):
    def ask_room(self, node: str | None, avoid: frozenset[str]) -> MemoryRoom:
        raise ClusterFailed("there will be none")


def test_a_cluster_that_will_never_have_room_ends_the_job(tmp_path: Path) -> None:
    with job_on(tmp_path, {"a": 1}, Exhausted) as job:
        job.until(Ready)
        job.engine.start(Assignment("", 0, 1, "t", {"params": {}}, "", "127.0.0.1:1", "token"))
        assert job.until(Unprepared).failure.message == "there will be none"


# --- gangs, whose hosts the cluster starts together


def test_what_the_loss_of_a_gang_costs_is_said_and_only_the_task_is_checked_at_home(tmp_path: Path) -> None:
    with job_on(tmp_path, {"a": 1, "b": 1, "c": 1}, home="c", workers=2, is_gang=True) as job:
        assert "costs the steps since the newest checkpoint" in job.until(Remark).message
        job.until(Ready)
        assert set(job.cluster.links) == {"c"}
        job.await_condition("its engine to end", lambda: "end_workers" in job.cluster.links["c"].told or None)


def test_of_a_gang_that_is_lost_the_first_was_killed_and_the_others_ended_with_their_group(tmp_path: Path) -> None:
    with job_on(tmp_path, {"a": 1, "b": 1, "c": 0}, home="c", workers=2, is_gang=True) as job:
        job.until(Remark)
        job.until(Ready)
        for slot in (0, 1):
            job.start(slot)
        job.cluster.lose(job.nodes[1], HostLost)
        job.cluster.lose(job.nodes[0], GroupLost)
        ends = {one.slot: one.code for one in (job.until(Exited), job.until(Exited))}
        assert ends == {1: LOST_WITH_ITS_HOST, 0: ENDED_WITH_ITS_GROUP}
        job.until(Remark, lambda one: job.nodes[1] in one.message)
        assert not [one for one in job.notices if isinstance(one, Remark)], "one loss, one remark"


def test_a_gang_that_waits_says_so_once_and_who_has_no_place_in_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "SAY_GANG_WAITING", 0.05)
    with job_on(tmp_path, {"a": 0}, workers=2, is_gang=True) as job:
        job.until(Remark)
        for slot in (0, 1, 2):
            job.engine.start(Assignment("", slot, 2, "t", {"params": {}}, "", "127.0.0.1:1", "token"))
        assert "the gang waits for 2 times {CPU: 1}" in job.until(Remark).message
        assert "worker 2 has no place: the gang was started with 2" in job.until(Remark).message
        assert not [one for one in job.notices if isinstance(one, Remark)]


def test_nothing_runs_on_after_the_end(tmp_path: Path) -> None:
    with job_on(tmp_path, {"a": 1, "b": 1}, workers=2) as job:
        job.until(Ready)
        for slot in (0, 1):
            job.start(slot)
    await_condition(
        "all threads to end",
        lambda: not [one for one in threading.enumerate() if one.name.startswith(("host", "cluster"))],
    )


class Unreachable(MemoryCluster):
    def connect(self) -> ClusterView:
        raise RequestError("there is no cluster")


def test_where_there_is_no_cluster_whoever_waits_is_told(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    engine = ClusterEngine(RunFolder(tmp_path), PREPARATION, Unreachable({}), ClusterSettings())
    with contextlib.closing(engine):
        with pytest.raises(QuorateError, match="there is no cluster"):
            engine.start_coordinator({"port": 0})
        with pytest.raises(QuorateError, match="there is no cluster"):
            engine.capacity()
        told = await_condition("a notice", lambda: engine.poll(0.05))
        assert isinstance(told[0], Unprepared)


class Silent(MemoryCluster):
    def connect(self) -> ClusterView:
        threading.Event().wait(PATIENCE)
        raise RequestError("nobody has answered")


def test_a_job_that_is_to_end_does_not_wait_for_a_cluster_that_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    stop = Failure("Interrupted", "terminated", exit_code=143)
    engine = ClusterEngine(RunFolder(tmp_path), PREPARATION, Silent({}), ClusterSettings(), lambda: stop)
    with contextlib.closing(engine), pytest.raises(JobFailed) as raised:
        engine.capacity()
    assert raised.value.exit_code == 143
