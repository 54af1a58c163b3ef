"""The hosts that a job has in a cluster: an agent on each node in use, told what to do and listened to.

What is called of the cluster may wait for it, and is called in other threads (`Calls`).
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from quorate.core.addresses import Network
from quorate.core.errors import JobError, QuorateError
from quorate.core.failure import Failure
from quorate.engines.ray.host import LogLines, Report
from quorate.storage.log_file import LogFile
from quorate.storage.run_folder import RunFolder

log = logging.getLogger(__name__)

Result = TypeVar("Result")
CALLS_AT_ONCE = 4
LISTEN = 5.0
"""Seconds for which a host's next report is waited for, before it is asked again."""
SUSPECT = 10.0
"""Seconds for which nobody is placed on the node of a host that was lost: the cluster may not know of it yet."""


class ClusterFailed(JobError):  # noqa: N818 (a happening, not a mistake)
    """There will be no room for workers, however long they wait."""


class HostLost(JobError):  # noqa: N818 (a happening, not a mistake)
    """The agent of a host is gone, and its processes with it. Its node lives, and may have another."""


class NodeLost(HostLost):
    """The node is gone as well."""


class GroupLost(HostLost):
    """The host was ended because another of its group is lost: all of them are started anew."""


@dataclass(frozen=True)
class Node:
    """A machine of the cluster, and what is free there by the cluster's own account.

    `is_draining`: it is about to be taken away, as a preemption notice tells; `deadline` is when, in seconds since
    1970, if that is known.
    """

    id: str
    address: str
    free: dict[str, float] = field(default_factory=dict)
    is_draining: bool = False
    deadline: float | None = None


def node_of(place: str) -> str:
    """The node that a place is on, where a node has several hosts: each for a place of its own, ``NODE/PLACE``."""
    return place.partition("/")[0]


@dataclass(frozen=True)
class ClusterView:
    """What there is: the nodes, the cores of all of them, and the node that this process runs on."""

    nodes: tuple[Node, ...]
    cores: int
    home: Network


class Room(Protocol):
    """The resources of one worker, taken or waited for."""

    def node(self) -> str | None:
        """The node that has them; None while there is none."""
        ...

    @property
    def gpus(self) -> str:
        """The GPUs of that node that are among them, as CUDA_VISIBLE_DEVICES names them."""
        ...

    def release(self) -> None:
        """Give them back."""
        ...


class HostLink(Protocol):
    """The way to a host's agent."""

    def tell(self, command: str, *arguments: Any) -> None:
        """Have the agent carry out a command, after those before it. Does not wait."""
        ...

    def next(self, arrived: int, seconds: float) -> list[tuple[int, Report]]:
        """Its reports after that number; waits that long for one. There are none either where it does not answer, and
        may again. Raises HostLost."""
        ...

    def close(self) -> None:
        """Let the agent go, which ends what it still has."""
        ...


class Cluster(Protocol):
    """Where hosts come from. Its methods may wait for the cluster, and are called from several threads."""

    def connect(self) -> ClusterView:
        """Called once, before everything else; raises RequestError where there is no cluster."""
        ...

    def look(self) -> ClusterView:
        """What there is now."""
        ...

    def open_host(self, node: str) -> HostLink:
        """Have an agent on a node; what it answers tells whether it could be."""
        ...

    def ask_room(self, node: str | None, avoid: frozenset[str]) -> Room:
        """The resources of one worker, on a node if that has them, and never on those to avoid."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class Calls:
    """Calls that may wait are made in other threads, and come back as something to do for the thread that turns: so
    what that knows needs no lock. What fails, and is not said to be heard by anybody else, is told to `failed`."""

    def __init__(self, failed: Callable[[Failure], None]) -> None:
        self._failed = failed
        self._todo: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._apart = ThreadPoolExecutor(CALLS_AT_ONCE, "cluster")
        self._under_way: set[Future[None]] = set()
        self._is_closed = False

    def put(self, todo: Callable[[], None]) -> None:
        """Have something done, after what was put before. From any thread."""
        self._todo.put(todo)

    def call(
        self,
        call: Callable[[], Result],
        then: Callable[[Result], None] = lambda _: None,
        failed: Callable[[Failure], None] | None = None,
    ) -> None:
        """Make a call, and go on with what it returns."""
        if not self._is_closed:
            self._under_way = {one for one in self._under_way if not one.done()}
            self._under_way.add(self._apart.submit(self.run, call, then, failed))

    def run(
        self,
        call: Callable[[], Result],
        then: Callable[[Result], None],
        failed: Callable[[Failure], None] | None = None,
    ) -> None:
        """The same in the thread that this is called from, which waits."""
        try:
            result = call()
        except QuorateError as error:
            failure = Failure.of(error)
        except Exception as error:
            log.exception("a call to the cluster has failed")
            failure = Failure("JobError", f"the cluster does not do what it is asked for: {error}")
        else:
            self.put(lambda: then(result))
            return
        self.put(lambda: (failed or self._failed)(failure))

    def turn(self, seconds: float) -> None:
        """Do what is to be done; waits that long for something."""
        with contextlib.suppress(Empty):
            todo = self._todo.get(timeout=max(seconds, 0.001))
            while True:
                todo()
                todo = self._todo.get_nowait()

    def close(self, patience: float) -> bool:
        """Make no more; whether those under way have ended in so many seconds."""
        self._is_closed = True
        self._apart.shutdown(wait=False, cancel_futures=True)
        # One that was cancelled before it began is never done, to those who wait.
        return not wait([one for one in self._under_way if not one.cancelled()], patience).not_done


class Nodes:
    """What is known of the nodes: what there was at the last look, and which of them are not to be used."""

    def __init__(self) -> None:
        # What there was at the last look.
        self.view: ClusterView | None = None
        # Also of those that are gone, of which there is most to tell.
        self._addresses: dict[str, str] = {}
        # Those that do not reach the run's storage, and never will.
        self.barred: set[str] = set()
        self._suspected: dict[str, float] = {}

    def see(self, view: ClusterView) -> None:
        self.view = view
        self._addresses |= {node.id: node.address for node in view.nodes}

    @property
    def draining(self) -> list[Node]:
        return [] if self.view is None else [node for node in self.view.nodes if node.is_draining]

    @property
    def avoided(self) -> frozenset[str]:
        now = time.monotonic()
        suspected = (node for node, since in self._suspected.items() if now - since <= SUSPECT)
        return frozenset(suspected) | self.barred | {node.id for node in self.draining}

    def suspect(self, node: str) -> None:
        """It may be gone, whatever the cluster says."""
        self._suspected[node] = time.monotonic()

    def in_words(self, node: str) -> str:
        address = self._addresses.get(node_of(node), "")
        return f"{address} (node {node[:8]})" if address else node[:8]


@dataclass(eq=False)
class Host:
    """An agent on a node. Commands wait until the way to it is known."""

    node: str
    link: HostLink | None = None
    waiting: list[tuple[Any, ...]] = field(default_factory=list)
    is_prepared: bool = False
    has_ended: bool = False

    def tell(self, command: str, *arguments: Any) -> None:
        if self.link is None:
            self.waiting.append((command, *arguments))
        else:
            self.link.tell(command, *arguments)


class Hosts:
    """Opens hosts, listens to each in a thread of its own, and writes what they log to the run's logs.

    `greetings` are the commands that a new one is told first. `hear` is given the reports, and `lost` is told who is
    gone, and how: both in the thread that turns.
    """

    def __init__(
        self,
        cluster: Cluster,
        calls: Calls,
        run: RunFolder,
        greetings: Sequence[tuple[Any, ...]],
        hear: Callable[[Host, Report], None],
        lost: Callable[[Host, HostLost], None],
    ) -> None:
        self._cluster = cluster
        self._calls = calls
        self._run = run
        self._greetings = greetings
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
            host = self._hosts[node] = Host(node, waiting=list(self._greetings))
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
        for command in host.waiting:
            link.tell(*command)
        listener = threading.Thread(target=self._listen, args=(host, link), name=f"host-{host.node[:8]}", daemon=True)
        self._listeners = [one for one in self._listeners if one.is_alive()] + [listener]
        listener.start()

    def _listen(self, host: Host, link: HostLink) -> None:
        """Pass on its reports until it is lost or let go."""
        arrived = 0
        while not self._is_closed:
            try:
                reports = link.next(arrived, LISTEN)
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
