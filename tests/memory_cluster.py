"""A cluster whose nodes are agents in this process, for tests of what stands on a cluster."""

import threading
from typing import Any

from quorate.core.addresses import Network
from quorate.engines.ray.host import EngineMaker, HostAgent, Report, local_engine
from quorate.engines.ray.hosts import ClusterView, HostLost, Node, NodeLost

GLANCE = 0.01


class MemoryLink:
    """The way to an agent, which ends when its node is lost."""

    def __init__(self, agent: HostAgent) -> None:
        self.agent = agent
        self.told: list[str] = []
        self.lost = threading.Event()
        self.how: type[HostLost] = NodeLost

    def tell(self, command: str, *arguments: Any) -> None:
        self.told.append(command)
        if not self.lost.is_set():
            self.agent.tell(command, *arguments)

    def next(self, arrived: int, seconds: float) -> list[tuple[int, Report]]:
        for _ in range(int(seconds / GLANCE)):
            reports = self.agent.next(arrived, GLANCE)
            if self.lost.is_set():
                raise self.how("its power was cut")
            if reports:
                return reports
        return []

    def close(self) -> None:
        self.agent.close()


class MemoryRoom:
    def __init__(self, cluster: "MemoryCluster", wanted: str | None, avoid: frozenset[str]) -> None:
        self._cluster = cluster
        self._wanted = wanted
        self.avoid = avoid
        self.taken: str | None = None
        self.gpus = ""

    def node(self) -> str | None:
        if self.taken is None:
            able = [node for node in self._cluster.free if node not in self.avoid and self._cluster.free[node] > 0]
            self.taken = self._wanted if self._wanted in able else next(iter(able), None)
            if self.taken is not None:
                self._cluster.free[self.taken] -= 1
                self.gpus = self._cluster.gpus_of.get(self.taken, "")
        return self.taken

    def release(self) -> None:
        if self.taken in self._cluster.free:
            self._cluster.free[self.taken] += 1


class MemoryCluster:
    """Nodes by name, each with so many places; `home` is where the launcher is."""

    def __init__(self, free: dict[str, int], make_engine: EngineMaker = local_engine, home: str = "") -> None:
        self.free = dict(free)
        self.gpus_of: dict[str, str] = {}
        self.draining: dict[str, float | None] = {}
        self.links: dict[str, MemoryLink] = {}
        self.is_closed = False
        self._make_engine = make_engine
        self._home = home or next(iter(free), "")

    def connect(self) -> ClusterView:
        return self.look()

    def look(self) -> ClusterView:
        nodes = tuple(
            Node(
                name,
                f"address-of-{name}",
                {"CPU": float(free), "bundle_group_0_1f": 999.0},
                name in self.draining,
                self.draining.get(name),
            )
            for name, free in self.free.items()
        )
        return ClusterView(nodes, sum(self.free.values()), Network("127.0.0.1", host=self._home))

    def open_host(self, node: str) -> MemoryLink:
        link = MemoryLink(HostAgent("run-0001", Network("127.0.0.1", host=node), self._make_engine))
        self.links[node] = link
        if node not in self.free:
            link.lost.set()
        return link

    def ask_room(self, node: str | None, avoid: frozenset[str]) -> MemoryRoom:
        return MemoryRoom(self, node, avoid)

    def lose(self, node: str, how: type[HostLost] = NodeLost) -> None:
        """A node is gone, and everything on it."""
        del self.free[node]
        self.links[node].how = how
        self.links[node].lost.set()  # first: nothing of what ends with it is told
        self.links[node].agent.close()

    def close(self) -> None:
        self.is_closed = True
        for link in self.links.values():
            link.agent.close()
