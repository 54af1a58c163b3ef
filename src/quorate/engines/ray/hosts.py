"""The hosts that a job has in a cluster: an agent on each node in use, told what to do and listened to; and on which of
them its coordinators are."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from quorate.core.errors import JobError
from quorate.core.failure import Failure
from quorate.engines.ray.cluster import Calls, Cluster, ClusterView, HostLink, HostLost, HostSilent, NodeLost, node_of
from quorate.engines.ray.host import CoordinatorAnswered, CoordinatorEnded, LogLines, Report
from quorate.storage.log_file import LogFile
from quorate.storage.run_folder import RunFolder

log = logging.getLogger(__name__)

LISTEN = 5.0
"""Seconds for which a host's next report is waited for, before it is asked again."""
AGAIN = 0.1
SUSPECT = 10.0
"""Seconds for which nobody is placed on the node of a host that was lost: the cluster may not know of it yet."""
KILL_PATIENCE = 5.0
"""Seconds for which the end of a coordinator that was killed is waited for. A host that does not answer may still have
it; it is fenced by its incarnation."""
GLANCE = 0.05


class Nodes:
    """What is known of the nodes: what there was at the last look, and which of them are not to be used."""

    def __init__(self) -> None:
        self._view: ClusterView | None = None
        # Also of those that are gone, of which there is most to tell.
        self._addresses: dict[str, str] = {}
        # Those that do not reach the run's storage, and never will.
        self.barred: set[str] = set()
        self._suspected: dict[str, float] = {}

    @property
    def view(self) -> ClusterView | None:
        """What there was at the last look."""
        return self._view

    @view.setter
    def view(self, view: ClusterView) -> None:
        self._view = view
        self._addresses |= {node.id: node.address for node in view.nodes}

    @property
    def avoided(self) -> frozenset[str]:
        draining = () if self.view is None else (node.id for node in self.view.nodes if node.is_draining)
        return frozenset(self._suspected) | self.barred | frozenset(draining)

    def suspect(self, node: str) -> None:
        """It may be gone, whatever the cluster says."""
        self._suspected[node] = time.monotonic()

    def trust_again(self, now: float) -> None:
        self._suspected = {node: since for node, since in self._suspected.items() if now - since <= SUSPECT}

    def in_words(self, node: str) -> str:
        address = self._addresses.get(node_of(node), "")
        return f"{address} (node {node[:8]})" if address else node[:8]


@dataclass(eq=False)
class Host:
    """An agent on a node. Commands wait until the way to it is known."""

    node: str
    link: HostLink | None = None
    waiting: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    is_asked_to_prepare: bool = False
    is_prepared: bool = False
    has_ended: bool = False

    def tell(self, command: str, *arguments: Any) -> None:
        if self.link is None:
            self.waiting.append((command, arguments))
        else:
            self.link.tell(command, *arguments)


class Hosts:
    """Opens hosts, listens to each in a thread of its own, and writes what they log to the run's logs.

    `greet` tells a new one what every host is told first. `hear` is given the reports, and `lost` is told who is gone,
    and how: both in the thread that turns.
    """

    def __init__(
        self,
        cluster: Cluster,
        calls: Calls,
        run: RunFolder,
        greet: Callable[[Host], None],
        hear: Callable[[Host, Report], None],
        lost: Callable[[Host, HostLost], None],
    ) -> None:
        self._cluster = cluster
        self._calls = calls
        self._run = run
        self._greet = greet
        self._hear = hear
        self._lost = lost
        self._hosts: dict[str, Host] = {}
        self._listeners: list[threading.Thread] = []
        self._logs: dict[str, LogFile] = {}
        self._is_closed = False

    @property
    def all(self) -> list[Host]:
        return list(self._hosts.values())

    def find(self, node: str) -> Host | None:
        return self._hosts.get(node)

    def on(self, node: str) -> Host:
        """The host on a node, opened if there is none."""
        if node not in self._hosts:
            host = self._hosts[node] = Host(node)
            self._greet(host)
            self._calls.call(
                lambda: self._cluster.open_host(node),
                lambda link: self._opened(host, link),
                lambda failure: self._lost(host, NodeLost(failure.message)),
            )
        return self._hosts[node]

    def drop(self, host: Host) -> bool:
        """Have nothing more to do with a host: what it still says is not heard. False if that is so already."""
        if self._hosts.get(host.node) is not host:
            return False
        del self._hosts[host.node]
        if host.link is not None:
            self._calls.call(host.link.close)
        return True

    def close(self, patience: float) -> bool:
        """Let all go, once nothing more is done; whether all have been heard to the end in so many seconds."""
        for host in self.all:
            if host.link is not None:
                host.link.close()
        self._is_closed = True
        over = time.monotonic() + patience
        for listener in self._listeners:
            listener.join(max(0.0, over - time.monotonic()))
        for file in self._logs.values():
            file.close()
        return not any(listener.is_alive() for listener in self._listeners)

    def _opened(self, host: Host, link: HostLink) -> None:
        if self._hosts.get(host.node) is not host:
            self._calls.call(link.close)
            return
        host.link = link
        for command, arguments in host.waiting:
            link.tell(command, *arguments)
        listener = threading.Thread(target=self._listen, args=(host, link), name=f"host-{host.node[:8]}", daemon=True)
        self._listeners = [one for one in self._listeners if one.is_alive()] + [listener]
        listener.start()

    def _listen(self, host: Host, link: HostLink) -> None:
        """Pass on its reports until it is lost or let go."""
        arrived = 0
        while not self._is_closed:
            try:
                reports = link.next(arrived, LISTEN)
            except HostSilent as error:
                log.info("%s", error)
                time.sleep(AGAIN)
                continue
            except HostLost as error:
                self._calls.put(partial(self._lost, host, error))
                return
            except Exception as error:
                log.exception("host %s could not be asked", host.node)
                self._calls.put(partial(self._lost, host, NodeLost(f"{error}")))
                return
            for number, report in reports:
                if number > arrived:
                    arrived = number
                    self._take(host, report)

    def _take(self, host: Host, report: Report) -> None:
        if isinstance(report, LogLines):
            file = self._logs.setdefault(report.log, LogFile(self._run.logs / f"{report.log}.jsonl"))
            # By the ends that the log has: a message may have other characters that end a line.
            file.append(*report.text.decode(errors="replace").removesuffix("\n").split("\n"))
        else:
            self._calls.put(lambda: self._hear(host, report) if self._hosts.get(host.node) is host else None)


class RemoteCoordinator:
    """Fulfils `CoordinatorChild`. `turn` does what is to be done in the engine, and waits that long for something;
    `end` has it end on its host, within so many seconds."""

    def __init__(
        self, number: int, turn: Callable[[float], None], end: Callable[["RemoteCoordinator", float], None]
    ) -> None:
        self.number = number
        self.pid = 0
        self._turn = turn
        self._end = end
        self._answer: dict[str, Any] = {}
        self._failure: Failure | None = None
        self._departure: str | None = None

    def answered(self, pid: int, answer: dict[str, Any], failure: Failure | None) -> None:
        """It is there, and listens if there is an answer, or cannot."""
        self.pid, self._answer, self._failure = pid, answer, failure

    def ended(self, departure: str) -> None:
        """It is gone, or counts as that."""
        self._departure = self._departure or departure

    def await_answer(self, limit: float | None = None) -> dict[str, Any]:
        self._turn_until(lambda: bool(self._answer or self._failure or self._departure), limit)
        # The failure says more than the end that follows it, and comes first.
        if self._failure is not None:
            raise self._failure.error()
        if not self._answer and self._departure is not None:
            raise JobError(f"{self._departure} before it listened.")
        return self._answer

    @property
    def is_alive(self) -> bool:
        self._turn(0.0)
        return self._departure is None

    @property
    def departure(self) -> str:
        return self._departure or f"the coordinator (pid {self.pid}) lives"

    def kill(self) -> None:
        self.close(0.0)

    def close(self, patience: float) -> None:
        if self._departure is None:
            self._end(self, patience)
            self._turn_until(lambda: self._departure is not None, patience + KILL_PATIENCE)
            self.ended(f"the coordinator (pid {self.pid}) was to end, and its host does not answer")

    def _turn_until(self, is_so: Callable[[], bool], limit: float | None) -> None:
        over = None if limit is None else time.monotonic() + limit
        while not is_so() and (over is None or time.monotonic() < over):
            self._turn(GLANCE)


class Coordinators:
    """Places coordinators on hosts. `stays_home`: on no other than the launcher's,
    whose folder of the run no other host has."""

    def __init__(self, hosts: Hosts, nodes: Nodes, run: str, stays_home: bool = False) -> None:
        self._hosts = hosts
        self._nodes = nodes
        self._stays_home = stays_home
        # The run's folder as every host reaches it.
        self._run = run
        self._placed: dict[int, tuple[RemoteCoordinator, str]] = {}
        self._unplaced: list[tuple[RemoteCoordinator, Mapping[str, Any]]] = []
        self._first_port: int | None = None
        self._failure: Failure | None = None

    @property
    def has_living(self) -> bool:
        return any(child.is_alive for child, _ in self._placed.values())

    def start(self, child: RemoteCoordinator, appointment: Mapping[str, Any]) -> None:
        """Start one as soon as there is a host for it."""
        if self._failure is not None:
            child.answered(0, {}, self._failure)
            child.ended(self._failure.message)
            return
        if self._first_port is None:
            self._first_port = appointment.get("port", 0)
        self._unplaced.append((child, {**appointment, "run": self._run}))
        self.place()

    def place(self) -> None:
        """Start those who wait, once it is known which nodes there are."""
        view = self._nodes.view
        while self._unplaced and view is not None and view.nodes:
            child, appointment = self._unplaced.pop(0)
            able = (node for _, node in reversed(self._placed.values()) if self._hosts.find(node))
            last = next((node for node in able if node not in self._nodes.avoided), None)
            node = self._next_node() if last is None or self._stays_home else last
            if node != last:
                # The port was free on the host of the last one only.
                appointment = {**appointment, "port": self._first_port}
            self._placed[child.number] = child, node
            self._hosts.on(node).tell("start_coordinator", child.number, appointment)

    def _next_node(self) -> str:
        """At home, which is there as long as the job is; where a host is; or anywhere."""
        assert self._nodes.view is not None
        home, avoid = self._nodes.view.home, self._nodes.avoided
        living = [node.id for node in self._nodes.view.nodes if node.id not in avoid]
        if home is not None and (home in living or self._stays_home):
            return home
        in_use = [host.node for host in self._hosts.all]
        return next((node for node in (*in_use, *living) if node not in avoid), self._nodes.view.nodes[0].id)

    def move_from(self, node: str) -> None:
        """End those on a node that is about to be taken away, if there is another: whoever holds them starts the next,
        there."""
        host = self._hosts.find(node)
        if host is not None and self._next_node() != node:
            for child, where in self._placed.values():
                if where == node and child.is_alive:
                    host.tell("end_coordinator", child.number, 0.0)

    def end(self, child: RemoteCoordinator, patience: float) -> None:
        """Let one end by itself, for so many seconds at most."""
        self._unplaced = [one for one in self._unplaced if one[0] is not child]
        _, node = self._placed.get(child.number, (None, ""))
        host = self._hosts.find(node)
        if host is None:
            child.ended(f"the coordinator (pid {child.pid}) is gone with its host")
        else:
            host.tell("end_coordinator", child.number, patience)

    def hear(self, report: CoordinatorAnswered | CoordinatorEnded) -> None:
        child, _ = self._placed[report.number]
        if isinstance(report, CoordinatorAnswered):
            child.answered(report.pid, report.answer, report.failure)
        else:
            child.ended(report.departure)

    def lose(self, host: Host) -> None:
        """Those on it are gone."""
        where = self._nodes.in_words(host.node)
        for child, node in self._placed.values():
            if node == host.node:
                child.ended(f"the coordinator (pid {child.pid}) is gone with its host {where}")

    def fail(self, failure: Failure) -> None:
        """There will be none."""
        self._failure = failure
        for child in [*(child for child, _ in self._unplaced), *(child for child, _ in self._placed.values())]:
            child.answered(0, {}, failure)
            child.ended(failure.message)
        self._unplaced.clear()
