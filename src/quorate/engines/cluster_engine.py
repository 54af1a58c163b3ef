"""The engine of a job on several hosts: an agent on each, workers shared out among them, and lost hosts made up for."""

import contextlib
import itertools
import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from quorate.core.errors import JobError, QuorateError, RequestError
from quorate.core.failure import Failure
from quorate.core.generation import name_of
from quorate.engines.cluster import Cluster, ClusterView, HostLink, HostLost, HostSilent, Room
from quorate.engines.engine import (
    Capacity,
    Exited,
    Interrupted,
    Notice,
    Preparation,
    Ready,
    Remark,
    SettingUp,
    Started,
    Unprepared,
)
from quorate.engines.host import CoordinatorAnswered, CoordinatorEnded, LogLines, Report, StorageChecked, WorkersEnded
from quorate.engines.placement import STRICT_SPREAD, choose_node, in_words, likely_nodes
from quorate.engines.remote_coordinator import RemoteCoordinator
from quorate.engines.shared_storage import Reach, share
from quorate.storage.log_file import LogFile
from quorate.storage.run_folder import RunFolder
from quorate.worker.assignment import Assignment

log = logging.getLogger(__name__)

LISTEN = 5.0
"""Seconds for which a host's next report is waited for, before it is asked again."""
AGAIN = 0.1
LOOK_FOR_ROOM = 0.05
"""Seconds between two looks at who waits for room."""
SAY_WAITING = 3.0
"""Seconds after which it is said."""
KEEP_ROOM = 10.0
"""Seconds for which the room of a worker that has ended is kept for the next in its place."""
SUSPECT = 10.0
"""Seconds for which nobody is placed on the node of a host that was lost: the cluster may not know of it yet."""
CLOSE_PATIENCE = 30.0


@dataclass(frozen=True)
class ClusterSettings:
    """What each worker takes, how workers are shared out, how many there are at first, and where the run is kept."""

    demand: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    placement: str = "spread"
    workers: int = 1
    # A folder that all hosts have mounted; without it they reach the run's own.
    storage: Path | None = None


@dataclass
class _Place:
    """A worker's place: who is to be there, the room for it, and the process that is."""

    assignment: Assignment | None = None
    room: Room | None = None
    # Where that was asked for, and where it is.
    target: str | None = None
    node: str | None = None
    pid: int | None = None
    since: float = 0.0
    is_told: bool = False

    @property
    def needs_room(self) -> bool:
        return self.assignment is not None and self.room is None


@dataclass
class _Host:
    """An agent on a node. Commands wait until the way to it is known."""

    node: str
    link: HostLink | None = None
    waiting: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    is_prepared: bool = False
    has_ended: bool = False

    def tell(self, command: str, *arguments: Any) -> None:
        if self.link is None:
            self.waiting.append((command, arguments))
        else:
            self.link.tell(command, *arguments)


class ClusterEngine:
    """Everything that is known is changed by one thread, which never waits for the cluster: calls to that are made
    apart, and come back as something to do. So what happens to a host is told at once, whatever the cluster is at."""

    def __init__(self, run: RunFolder, preparation: Preparation, cluster: Cluster, settings: ClusterSettings) -> None:
        self._run = run
        self._preparation = preparation
        self._cluster = cluster
        self._settings = settings
        self._shared = share(run, settings.storage)
        self._reach = Reach(self._shared.path)
        # Nodes that do not reach it, and never will.
        self._barred: set[str] = set()
        self._todo: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._notices: SimpleQueue[Notice] = SimpleQueue()
        self._apart = ThreadPoolExecutor(4, "cluster")
        self._places: dict[int, _Place] = {}
        self._hosts: dict[str, _Host] = {}
        self._suspected: dict[str, float] = {}
        self._logs: dict[str, LogFile] = {}
        self._numbers = itertools.count(1)
        self._coordinators: dict[int, tuple[RemoteCoordinator, str, Mapping[str, Any]]] = {}
        self._unplaced: list[tuple[RemoteCoordinator, Mapping[str, Any]]] = []
        self._first_port: int | None = None
        self._is_ready = False
        self._is_asking = False
        self._is_looking = False
        self._looked = 0.0
        self._view: ClusterView | None = None
        self._failure: Failure | None = None
        self._known = threading.Event()
        self._is_ending = False
        self._ended = threading.Event()
        self._is_closed = False
        self._keeper = threading.Thread(target=self._keep, name="cluster-engine", daemon=True)
        self._keeper.start()
        self._call(cluster.connect, self._connected)

    # --- the supervisor's calls

    def capacity(self) -> Capacity:
        self._known.wait()
        if self._failure is not None:
            raise self._failure.error()
        return Capacity(1 if self._view is None else self._view.cores, spans_hosts=True)

    def start_coordinator(self, appointment: Mapping[str, Any]) -> RemoteCoordinator:
        child = RemoteCoordinator(next(self._numbers), self._end_coordinator)
        self._todo.put(lambda: self._start_coordinator(child, appointment))
        return child

    def start(self, assignment: Assignment) -> None:
        self._todo.put(lambda: self._start(assignment))

    def poll(self, seconds: float) -> list[Notice]:
        notices = []
        with contextlib.suppress(Empty):
            notices.append(self._notices.get(timeout=max(seconds, 0.001)))
            while True:
                notices.append(self._notices.get_nowait())
        return notices

    def kill(self, slot: int, pid: int) -> None:
        self._todo.put(lambda: self._kill(slot, pid))

    def close(self) -> None:
        """A coordinator that lives stays until it is closed itself: it has the last word. The next call ends all."""
        if self._is_closed:
            return
        self._todo.put(self._end_workers)
        self._ended.wait(CLOSE_PATIENCE)
        if any(child.is_alive for child, _, _ in list(self._coordinators.values())):
            return
        self._is_closed = True
        self._todo.put(lambda: None)
        self._keeper.join(CLOSE_PATIENCE)
        for host in list(self._hosts.values()):
            if host.link is not None:
                host.link.close()
        self._apart.shutdown(wait=False, cancel_futures=True)
        self._cluster.close()
        for file in self._logs.values():
            file.close()
        self._reach.close()

    # --- the thread that knows everything

    def _keep(self) -> None:
        while not self._is_closed:
            with contextlib.suppress(Empty):
                todo = self._todo.get(timeout=LOOK_FOR_ROOM)
                while True:
                    try:
                        todo()
                    except Exception as error:
                        log.exception("the engine itself has failed")
                        self._fail(Failure("InternalError", f"Quorate failed: {error!r}"))
                    todo = self._todo.get_nowait()
            now = time.monotonic()
            if not self._is_ending and now - self._looked >= LOOK_FOR_ROOM:
                self._looked = now
                self._look_for_room(now)
                self._give_back(now)

    def _call(self, call: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Make a call that may wait for the cluster, and go on with what it returns."""

        def called() -> None:
            try:
                result = call()
            except QuorateError as error:
                failure = Failure.of(error)
                self._todo.put(lambda: self._fail(failure))
            except Exception as error:
                log.exception("a call to the cluster has failed")
                reason = f"the cluster does not do what it is asked for: {error}"
                self._todo.put(lambda: self._fail(Failure("JobError", reason)))
            else:
                self._todo.put(lambda: then(result))

        if not self._is_closed:
            self._apart.submit(called)

    def _fail(self, failure: Failure) -> None:
        """Before there is a host, it is the end; later it may pass, and who waits goes on waiting."""
        self._is_asking = self._is_looking = False
        if self._is_ready:
            self._notices.put(Remark(failure.message))
            return
        self._failure = failure
        self._known.set()
        self._notices.put(Unprepared(failure))
        for child in [child for child, _ in self._unplaced] + [child for child, _, _ in self._coordinators.values()]:
            child.answered(0, {}, failure)
            child.ended(failure.message)

    def _connected(self, view: ClusterView) -> None:
        self._view = view
        self._known.set()
        likely = likely_nodes(view.nodes, self._settings.demand, self._settings.workers, self._settings.placement)
        if not likely:
            # Nobody has room now. The task is imported all the same: what is wrong with it should not wait for that.
            likely = [node.id for node in view.nodes][:1]
        if not likely:
            self._fail(Failure.of(JobError("the cluster has no node that lives.")))
            return
        for node in likely:
            self._prepare(node)
        self._place_coordinators()

    # --- hosts

    def _host(self, node: str) -> _Host:
        if node not in self._hosts:
            host = self._hosts[node] = _Host(node)
            host.tell("check_storage", self._reach.folder, self._reach.nonce)
            self._call(lambda: self._cluster.open_host(node), lambda link: self._opened(host, link))
        return self._hosts[node]

    def _prepare(self, node: str) -> _Host:
        host = self._host(node)
        if not host.is_prepared:
            host.is_prepared = True
            host.tell("prepare", self._preparation)
        return host

    def _opened(self, host: _Host, link: HostLink) -> None:
        host.link = link
        for command, arguments in host.waiting:
            link.tell(command, *arguments)
        host.waiting.clear()
        threading.Thread(target=self._listen, args=(host, link), name=f"host-{host.node[:8]}", daemon=True).start()

    def _listen(self, host: _Host, link: HostLink) -> None:
        """In a thread for each host: pass on its reports until it is lost."""
        arrived = 0
        while not self._is_closed:
            try:
                reports = link.next(arrived, LISTEN)
            except HostSilent as error:
                log.info("%s", error)
                time.sleep(AGAIN)
                continue
            except HostLost as error:
                self._todo.put(partial(self._lost, host, error.message, error.node_lives))
                return
            except Exception as error:
                if not self._is_closed:
                    log.exception("host %s could not be asked", host.node)
                    self._todo.put(partial(self._lost, host, f"{error}", False))
                return
            for number, report in reports:
                if number > arrived:
                    arrived = number
                    self._take(host, report)

    def _take(self, host: _Host, report: Report) -> None:
        if isinstance(report, LogLines):
            path = self._run.logs / f"{report.log}.jsonl"
            file = self._logs.setdefault(report.log, LogFile(path))
            file.append(*report.text.decode(errors="replace").splitlines())
        else:
            self._todo.put(lambda: self._hear(host, report))

    def _hear(self, host: _Host, report: Report) -> None:
        match report:
            case CoordinatorAnswered(number, pid, answer, failure):
                self._coordinators[number][0].answered(pid, answer, failure)
            case CoordinatorEnded(number, departure):
                self._coordinators[number][0].ended(departure)
            case WorkersEnded():
                host.has_ended = True
                self._note_ends()
            case StorageChecked(reason):
                self._check_reach(host, reason)
            case Started() | Exited() | SettingUp():
                self._hear_of_worker(host, report)
            case Ready() if self._is_ready:
                pass  # of the first one: what another finds is the same
            case Ready():
                self._is_ready = True
                self._notices.put(report)
            case Unprepared(failure) if self._is_ready:
                where = f"host {self._address(host.node)}: {failure.message}"
                self._notices.put(Unprepared(failure.at(message=where)))
            case Unprepared() | Interrupted() | Remark():
                self._notices.put(report)

    def _check_reach(self, host: _Host, reason: str) -> None:
        """A job whose first hosts cannot all save and load is not begun; later such a host is not used."""
        if not reason and not self._reach.is_answered_by(host.node):
            reason = "what it writes there is not seen here"
        if not reason:
            return
        told = (
            f"host {self._address(host.node)} does not reach the run's folder {self._reach.folder}: {reason}. "
            "Set engine.storage to a folder that all hosts have mounted under the same path."
        )
        if not self._is_ready:
            self._fail(Failure.of(RequestError(told)))
            return
        self._barred.add(host.node)
        if host.link is not None:
            self._call(host.link.close, lambda _: None)
        self._lost(host, told, True)

    def _hear_of_worker(self, host: _Host, report: Started | Exited | SettingUp) -> None:
        """What is told of one that counts as gone is not passed on."""
        place = self._places.get(report.slot)
        if isinstance(report, Started):
            if place is None or place.node != host.node:
                host.tell("kill", report.slot, report.pid)  # somebody else has its place
                return
            place.assignment, place.pid = None, report.pid
            self._notices.put(replace(report, how=f"{report.how}, on host {self._address(host.node)}"))
        elif place is not None and place.pid == report.pid:
            if isinstance(report, Exited):
                place.pid, place.since = None, time.monotonic()
            self._notices.put(report)

    def _lost(self, host: _Host, reason: str, node_lives: bool) -> None:
        """Everything there is gone. Who was to be there goes elsewhere; who takes the place of the others is decided
        when it is known that they are gone."""
        if self._hosts.get(host.node) is not host:
            return
        del self._hosts[host.node]
        if not node_lives:
            self._suspected[host.node] = time.monotonic()
        if self._is_ending:
            host.has_ended = True
            self._note_ends()
        else:
            self._notices.put(Remark(f"host {self._address(host.node)} is lost: {reason}"))
        for child, node, _ in list(self._coordinators.values()):
            if node == host.node:
                child.ended(f"the coordinator (pid {child.pid}) is gone with its host {self._address(host.node)}")
        for slot, place in self._places.items():
            if place.node != host.node:
                continue
            self._leave(place)
            if place.pid is not None:
                pid, place.pid = place.pid, None
                self._notices.put(Exited(slot, pid, -signal.SIGKILL))
        if not self._is_ready and not self._is_ending and not self._hosts:
            self._notices.put(Interrupted(f"host {self._address(host.node)} is lost: {reason}"))

    def _address(self, node: str) -> str:
        nodes = () if self._view is None else self._view.nodes
        address = next((one.address for one in nodes if one.id == node), "")
        return f"{address} (node {node[:8]})" if address else node[:8]

    # --- workers

    def _start(self, assignment: Assignment) -> None:
        place = self._places.setdefault(assignment.slot, _Place())
        assignment = self._on_storage(assignment)
        place.assignment, place.since, place.is_told = assignment, time.monotonic(), False
        if place.node is not None:
            self._send(place, place.node)
        else:
            self._ask_room()

    def _on_storage(self, assignment: Assignment) -> Assignment:
        """With paths that mean the same on every host."""
        checkpoint = assignment.checkpoint
        if checkpoint is not None and Path(checkpoint).parent == self._run.checkpoints:
            checkpoint = str(self._shared.checkpoints / Path(checkpoint).name)
        return replace(assignment, storage=str(self._shared.path), checkpoint=checkpoint)

    def _send(self, place: _Place, node: str) -> None:
        assert place.assignment is not None
        self._prepare(node).tell("start", place.assignment)

    def _ask_room(self) -> None:
        """For one after the other: where the next goes depends on those before."""
        place = next((one for one in self._places.values() if one.needs_room), None)
        if place is None or self._is_asking:
            return
        self._is_asking = True
        others = [one for one in self._places.values() if one.room is not None]
        placed = [node for one in others if (node := one.node or one.target) is not None]
        pending = [one.target for one in others if one.node is None and one.target is not None]
        avoid = frozenset(self._suspected) | self._barred
        settings, ready = self._settings, set(self._hosts)

        def ask() -> tuple[ClusterView, str | None, Room]:
            view = self._cluster.look()
            node = choose_node(view.nodes, settings.demand, placed, pending, settings.placement, avoid, ready)
            apart = frozenset(placed) if settings.placement == STRICT_SPREAD else frozenset()
            return view, node, self._cluster.ask_room(node, avoid | apart)

        def asked(answer: tuple[ClusterView, str | None, Room]) -> None:
            self._is_asking = False
            self._view, place.target, place.room = answer
            self._ask_room()

        self._call(ask, asked)

    def _look_for_room(self, now: float) -> None:
        for node, since in list(self._suspected.items()):
            if now - since > SUSPECT:
                del self._suspected[node]
        self._ask_room()
        for slot, place in self._places.items():
            if place.assignment is None or place.node is not None:
                continue
            if now - place.since > SAY_WAITING and not place.is_told:
                place.is_told = True
                self._notices.put(Remark(self._waiting_in_words(slot)))
        waiting = [
            (place, place.room) for place in self._places.values() if place.room is not None and place.node is None
        ]
        if waiting and not self._is_looking:
            self._is_looking = True
            self._call(lambda: [(place, room, room.node()) for place, room in waiting], self._found)

    def _found(self, rooms: list[tuple[_Place, Room, str | None]]) -> None:
        self._is_looking = False
        for place, room, node in rooms:
            if node is None or place.room is not room or place.node is not None:
                continue
            if node in self._suspected or node in self._barred:
                self._leave(place)
                continue
            place.node = node
            if place.assignment is not None:
                self._send(place, node)

    def _waiting_in_words(self, slot: int) -> str:
        nodes = () if self._view is None else self._view.nodes
        free = "; ".join(f"{node.address}: {in_words(node.free)}" for node in nodes) or "no node"
        return (
            f"{name_of(slot)} waits for {in_words(self._settings.demand)}: free in the cluster is {free}."
            " The others train meanwhile."
        )

    def _give_back(self, now: float) -> None:
        """The room of who has left and is not followed by anybody."""
        for place in self._places.values():
            is_empty = place.room is not None and place.assignment is None and place.pid is None
            if is_empty and now - place.since > KEEP_ROOM:
                self._leave(place)

    def _leave(self, place: _Place) -> None:
        room, place.room, place.node, place.target = place.room, None, None, None
        if room is not None:
            self._call(room.release, lambda _: None)

    def _kill(self, slot: int, pid: int) -> None:
        place = self._places.get(slot)
        if place is not None and place.pid == pid and place.node is not None:
            self._host(place.node).tell("kill", slot, pid)

    # --- coordinators

    def _start_coordinator(self, child: RemoteCoordinator, appointment: Mapping[str, Any]) -> None:
        if self._failure is not None:
            child.answered(0, {}, self._failure)
            child.ended(self._failure.message)
            return
        if self._first_port is None:
            self._first_port = appointment.get("port", 0)
        appointment = {**appointment, "run": str(self._shared.path)}
        self._unplaced.append((child, appointment))
        self._place_coordinators()

    def _place_coordinators(self) -> None:
        """Where the last one was, if that is there; at home, which is there as long as the job is; or anywhere."""
        if self._view is None:
            return
        while self._unplaced:
            child, appointment = self._unplaced.pop()
            last = next((node for _, node, _ in reversed(self._coordinators.values()) if node in self._hosts), None)
            avoid = self._suspected.keys() | self._barred
            living = [node.id for node in self._view.nodes if node.id not in avoid]
            node = last or (self._view.home if self._view.home in living else None) or next(iter(self._hosts), None)
            if node is None:
                node = next(iter(living), None) or self._view.nodes[0].id
            if node != last:
                # The port was free on the host of the last one only.
                appointment = {**appointment, "port": self._first_port}
            self._coordinators[child.number] = child, node, appointment
            self._host(node).tell("start_coordinator", child.number, appointment)

    def _end_coordinator(self, child: RemoteCoordinator, patience: float) -> None:
        def end() -> None:
            self._unplaced = [one for one in self._unplaced if one[0] is not child]
            known = self._coordinators.get(child.number)
            host = None if known is None else self._hosts.get(known[1])
            if host is None:
                child.ended(f"the coordinator (pid {child.pid}) is gone with its host")
            else:
                host.tell("end_coordinator", child.number, patience)

        self._todo.put(end)

    # --- the end

    def _end_workers(self) -> None:
        if not self._is_ending:
            self._is_ending = True
            for host in self._hosts.values():
                host.tell("end_workers")
            for place in self._places.values():
                place.assignment = None
        self._note_ends()

    def _note_ends(self) -> None:
        # One whose way is not known yet has nobody: it is closed without a word.
        if self._is_ending and all(host.has_ended for host in self._hosts.values() if host.link is not None):
            self._ended.set()
