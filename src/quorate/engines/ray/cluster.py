"""What an engine of several hosts needs of the cluster that it runs on, and how it calls it without waiting."""

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from quorate.core.errors import JobError, QuorateError
from quorate.core.failure import Failure
from quorate.engines.ray.host import Report

log = logging.getLogger(__name__)

Result = TypeVar("Result")
CALLS_AT_ONCE = 4


class ClusterFailed(JobError):  # noqa: N818 (a happening, not a mistake)
    """There will be no room for workers, however long they wait."""


class HostLost(JobError):  # noqa: N818 (a happening, not a mistake)
    """The agent of a host is gone, and its processes with it. Its node lives, and may have another."""


class NodeLost(HostLost):
    """The node is gone as well."""


class GroupLost(HostLost):
    """The host was ended because another of its group is lost: all of them are started anew."""


class HostSilent(JobError):  # noqa: N818 (a happening, not a mistake)
    """A host does not answer; it may again."""


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
    """What there is: the nodes, the cores of all of them, and the node that this process runs on, if it is one."""

    nodes: tuple[Node, ...]
    cores: int
    home: str | None = None


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
        """Its reports after that number; waits that long for one. Raises HostLost or HostSilent."""
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
        return not wait(self._under_way, patience).not_done
