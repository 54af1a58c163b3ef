"""What an engine does with a node that is about to be taken away: everybody leaves it in good order."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.test_cluster_engine import Job, job_on
from memory_cluster import MemoryCluster, MemoryLink, MemoryRoom
from memory_engine import MemoryEngine
from quorate.engines.engine import Exited, Ready, Remark, Started
from quorate.engines.ray import places
from quorate.engines.ray.hosts import ClusterView, node_of
from quorate.worker.assignment import Assignment


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(places, "LOOK_AT_NODES", 0.02)
    yield


def engine_on(job: Job, node: str) -> MemoryEngine:
    engine = job.cluster.links[node].agent._engine
    assert isinstance(engine, MemoryEngine)
    return engine


def test_workers_of_a_draining_node_are_asked_to_leave_once_and_their_places_are_filled_elsewhere(
    tmp_path: Path,
) -> None:
    with job_on(tmp_path, {"a": 4, "b": 4, "c": 4}, workers=3) as job:
        job.until(Ready)
        pids = {slot: job.start(slot).pid for slot in range(3)}
        node = job.nodes[1]
        job.cluster.draining[node] = time.time() + 100
        told = job.until(Remark).message
        assert f"address-of-{node}" in told
        assert "is about to be taken away in " in told
        exited = job.until(Exited)
        assert (exited.slot, exited.pid, exited.code) == (1, pids[1], 0), "it was not killed"
        for slot in (1, 3, 4, 5):
            job.start(slot)
            assert job.nodes[slot] != node
        assert engine_on(job, node).terminated == [pids[1]]
        assert not [one for one in job.notices if isinstance(one, Exited | Remark)], "the others stay"
        job.await_condition("its room to be free", lambda: job.cluster.free[node] == 4)


def test_who_was_to_be_there_goes_elsewhere(tmp_path: Path) -> None:
    with job_on(tmp_path, {"a": 1, "b": 1}) as job:
        job.until(Ready)
        (node,) = job.cluster.links
        engine_on(job, node).is_importing = True
        job.engine.start(Assignment("", 0, 1, "t", {"params": {}}, "", "127.0.0.1:1", "token"))
        job.await_condition("the command", lambda: "start" in job.cluster.links[node].told)
        job.cluster.draining[node] = None
        assert f"address-of-{node}" not in job.until(Started).how


def test_a_job_that_begins_does_not_begin_on_a_draining_node(tmp_path: Path) -> None:
    class Draining(MemoryCluster):
        def connect(self) -> ClusterView:
            self.draining["a"] = None
            return super().connect()

    with job_on(tmp_path, {"a": 1, "b": 1}, Draining) as job:
        job.until(Ready)
        job.start(0)
        assert job.nodes[0] == "b"
        assert "a" not in job.cluster.links


class GangRoom(MemoryRoom):
    def node(self) -> str | None:
        taken = super().node()
        return None if taken is None else f"{taken}/group-0"


class GangCluster(MemoryCluster):
    """Its hosts are those of places, as Ray Train's are."""

    def ask_room(self, node: str | None, avoid: frozenset[str]) -> MemoryRoom:
        return GangRoom(self, node, avoid)

    def open_host(self, node: str) -> MemoryLink:
        link = super().open_host(node_of(node))
        self.links[node] = self.links.pop(node_of(node))
        return link


def test_all_of_a_gang_are_asked_to_leave_and_leave_their_places_when_one_node_drains(tmp_path: Path) -> None:
    with job_on(tmp_path, {"a": 1, "b": 1, "c": 0}, GangCluster, home="c", workers=2, is_gang=True) as job:
        job.until(Ready)
        pids = [job.start(slot).pid for slot in (0, 1)]
        job.cluster.draining["a"] = None
        exits = [job.until(Exited) for _ in pids]
        assert sorted((one.pid, one.code) for one in exits) == sorted((pid, 0) for pid in pids), "nobody was killed"
        job.await_condition("their rooms to be free", lambda: job.cluster.free["a"] == job.cluster.free["b"] == 1)
