"""The hosts that a job has in a cluster: an agent on each node in use, told what to do and listened to."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from quorate.engines.cluster import Cluster, ClusterView, HostLink, HostLost, HostSilent, NodeLost, node_of
from quorate.engines.event_loop import EventLoop
from quorate.engines.host import LogLines, Report
from quorate.storage.log_file import LogFile
from quorate.storage.run_folder import RunFolder

log = logging.getLogger(__name__)

LISTEN = 5.0
"""Seconds for which a host's next report is waited for, before it is asked again."""
AGAIN = 0.1
SUSPECT = 10.0
"""Seconds for which nobody is placed on the node of a host that was lost: the cluster may not know of it yet."""


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

    def has_link(self, link: HostLink) -> None:
        self.link = link
        for command, arguments in self.waiting:
            link.tell(command, *arguments)
        self.waiting.clear()


class Hosts:
    """Opens hosts, listens to each in a thread of its own, and writes what they log to the run's logs.

    `greet` tells a new one what every host is told first. `hear` is given the reports, and `lost` is told who is gone,
    and how: both in the loop's thread.
    """

    def __init__(
        self,
        cluster: Cluster,
        loop: EventLoop,
        run: RunFolder,
        greet: Callable[[Host], None],
        hear: Callable[[Host, Report], None],
        lost: Callable[[Host, HostLost], None],
    ) -> None:
        self._cluster = cluster
        self._loop = loop
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
            self._loop.call(
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
            self._loop.call(host.link.close)
        return True

    def close(self, patience: float) -> bool:
        """Let all go, once the loop does nothing more; whether all have been heard to the end in so many seconds."""
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
            self._loop.call(link.close)
            return
        host.has_link(link)
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
                self._loop.put(partial(self._lost, host, error))
                return
            except Exception as error:
                log.exception("host %s could not be asked", host.node)
                self._loop.put(partial(self._lost, host, NodeLost(f"{error}")))
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
            self._loop.put(lambda: self._hear_if_current(host, report))

    def _hear_if_current(self, host: Host, report: Report) -> None:
        if self._hosts.get(host.node) is host:
            self._hear(host, report)
