"""The engine of a job on several hosts: an agent on each, workers shared out among them, and lost hosts made up for."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quorate.core.errors import JobError, RequestError
from quorate.core.failure import Failure, JobFailed
from quorate.core.generation import ENDED_WITH_ITS_GROUP, LOST_WITH_ITS_HOST
from quorate.engines.engine import (
    Capacity,
    Engine,
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
from quorate.engines.ray.host import AgentFailed, Report, StorageChecked, WorkersEnded
from quorate.engines.ray.hosts import (
    Calls,
    Cluster,
    ClusterView,
    GroupLost,
    Host,
    HostLost,
    Hosts,
    Node,
    NodeLost,
    Nodes,
    node_of,
)
from quorate.engines.ray.node_code import NodeCode, node_code, with_remedy, without_installed
from quorate.engines.ray.option import RaySpec
from quorate.engines.ray.places import ClusterSettings, Place, Places, likely_nodes
from quorate.engines.ray.shared_storage import Reach, share
from quorate.engines.warm import CoordinatorChildProcess
from quorate.spec.job import JobSpec
from quorate.storage.run_folder import RunFolder
from quorate.worker.assignment import Assignment

log = logging.getLogger(__name__)

TICK = 0.05
"""Seconds between two looks at who waits for room, and at which nodes are about to be taken away."""
LOOK_AT_STOP = 0.1
"""Seconds between two looks whether the job is to end, while the cluster is connected to."""
CLOSE_PATIENCE = 30.0
GANG_LOSS = (
    "a worker that dies is replaced where it was, and costs no completed step. A node that is lost, or a process of Ray"
    " Train, costs the steps since the newest checkpoint: all workers start again from it. If a node is announced to"
    " be taken away, they save first."
)
"""What is said once of a gang on a cluster."""


def open_engine(
    run: RunFolder,
    preparation: Preparation,
    spec: JobSpec,
    places: int,
    stopped: Callable[[], Failure | None],
    code: NodeCode | None = None,
    fit: Callable[[Any], None] | None = None,
) -> Engine:
    """The engine of a job with so many processes at first. `code` is what nodes are given, if not what follows from the
    job, and `fit` runs the trainer of a gang, if it is not the usual one."""
    # Which takes a second, and is an extra.
    from quorate.engines.ray.ray_cluster import RayCluster

    engine = spec.engine
    assert isinstance(engine, RaySpec)
    demand = engine.resources_each(spec.device, spec.threads)
    storage = None if engine.storage is None or run.stored else Path(engine.storage)
    settings = ClusterSettings(demand, engine.placement, places, storage, is_gang=spec.strategy.is_gang)
    sent = code or node_code(spec, preparation.task, run.path.parent, preparation.job_source)
    if settings.is_gang:
        from quorate.engines.ray.train import RayTrainCluster

        folder = str(run.path if storage is None else storage / run.name)
        cluster: Cluster = RayTrainCluster(engine.address, settings, sent, folder, fit)
    else:
        cluster = RayCluster(engine.address, run.name, demand, sent)
    return ClusterEngine(run, without_installed(preparation), cluster, settings, stopped)


class ClusterEngine:
    """Everything that is known is changed by the supervisor's thread, which never waits for the cluster: so what
    happens to a host is told at once, whatever the cluster is at. `stopped` tells why the job is to end while it is
    connected to."""

    def __init__(
        self,
        run: RunFolder,
        preparation: Preparation,
        cluster: Cluster,
        settings: ClusterSettings,
        stopped: Callable[[], Failure | None] = lambda: None,
    ) -> None:
        self._run = run
        self._cluster = cluster
        self._settings = settings
        self._stopped = stopped
        self._shared = share(run, settings.storage)
        # What every host has to reach: where the run is kept.
        self._place = str(self._shared.path) if run.stored is None else run.stored.url
        self._reach = Reach(self._place)
        self._notices: list[Notice] = []
        self._calls = Calls(self._fail)
        self._nodes = Nodes()
        greetings = [("check_storage", self._reach.place, self._reach.nonce), ("prepare", preparation)]
        self._hosts = Hosts(cluster, self._calls, run, greetings, self._hear, self._lost)
        self._places = Places(cluster, self._calls, self._nodes, self._hosts, settings, self._notices, found=self._send)
        self._tick_due = 0.0
        # Nodes that are about to be taken away, whose workers have been asked to leave.
        self._draining: set[str] = set()
        self._is_ready = False
        self._failure: Failure | None = None
        self._is_ending = False
        self._is_closed = False
        self._over = threading.Event()
        # Not one of the other calls, which a process waits for at its end: this one may take minutes.
        threading.Thread(target=self._connect, name="cluster-connect", daemon=True).start()

    # --- the supervisor's calls

    def capacity(self) -> Capacity:
        return Capacity(self._view().cores, spans_hosts=True)

    def start_coordinator(self, appointment: Mapping[str, Any]) -> CoordinatorChildProcess:
        """Beside the launcher: whoever drives a cluster of Ray's is on a node of it."""
        return CoordinatorChildProcess({**appointment, "run": str(self._shared.path)}, self._view().home)

    def start(self, assignment: Assignment) -> None:
        # With paths that mean the same on every host.
        checkpoint = assignment.checkpoint
        if checkpoint is not None and Path(checkpoint).parent == self._run.checkpoints:
            checkpoint = str(self._shared.checkpoints / Path(checkpoint).name)
        self._places.fill(replace(assignment, storage=self._place, checkpoint=checkpoint))

    def poll(self, seconds: float) -> list[Notice]:
        over = time.monotonic() + seconds
        self._turn(0.0)
        while not self._notices and (left := over - time.monotonic()) > 0:
            self._turn(left)
        told = list(self._notices)
        self._notices.clear()
        return told

    def kill(self, slot: int, pid: int) -> None:
        self._tell_worker("kill", slot, pid)

    def terminate(self, slot: int, pid: int) -> None:
        self._tell_worker("terminate", slot, pid)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = self._is_ending = True
        for host in self._hosts.all:
            host.tell("end_workers")
        self._places.end()
        over = time.monotonic() + CLOSE_PATIENCE
        # One whose way is not known yet has nobody: it is closed without a word.
        while any(host.link is not None and not host.has_ended for host in self._hosts.all):
            self._turn(TICK)
            if time.monotonic() > over:
                log.warning("hosts have not said within %.0f s that their workers are gone", CLOSE_PATIENCE)
                break
        # Nobody may call the cluster after its end: Ray would begin another.
        has_connected = self._nodes.view is not None or self._failure is not None
        is_over = self._calls.close(CLOSE_PATIENCE if has_connected else 0.0)
        is_heard = self._hosts.close(CLOSE_PATIENCE)
        if has_connected and not (is_over and is_heard):
            log.warning("the cluster has not answered within %.0f s", CLOSE_PATIENCE)
        self._cluster.close()
        self._over.set()
        self._reach.close()

    def _connect(self) -> None:
        self._calls.run(self._cluster.connect, self._connected)
        # A cluster that was started here (address: local) is ended by the kernel with the thread that has started it.
        self._over.wait()

    def _view(self) -> ClusterView:
        """Wait until the cluster is connected to."""
        while self._nodes.view is None:
            if self._failure is not None:
                raise self._failure.error()
            self._turn(LOOK_AT_STOP)
            if (failure := self._stopped()) is not None:
                raise JobFailed(failure)
        return self._nodes.view

    # --- what is done in its turn

    def _turn(self, seconds: float) -> None:
        self._calls.turn(min(seconds, TICK))
        if (now := time.monotonic()) >= self._tick_due and not self._is_ending and self._failure is None:
            self._tick_due = now + TICK
            self._places.look(now)
            for node in self._nodes.draining:
                if node.id not in self._draining:
                    self._draining.add(node.id)
                    self._leave(node)

    def _fail(self, failure: Failure) -> None:
        """Before there is a host, it is the end; later it may pass, and who waits goes on waiting."""
        if self._is_ready:
            self._notices.append(Remark(failure.message))
            return
        self._failure = failure
        self._notices.append(Unprepared(failure))

    def _connected(self, view: ClusterView) -> None:
        self._nodes.see(view)
        settings = self._settings
        if settings.is_gang:
            self._notices.append(Remark(GANG_LOSS))
            likely = [view.home.host]  # only to check the task
        else:
            lasting = [node for node in view.nodes if not node.is_draining]
            likely = likely_nodes(lasting, settings.demand, settings.workers, settings.placement)
        if not likely:
            # Nobody has room now. The task is imported all the same: what is wrong with it should not wait for that.
            likely = [node.id for node in view.nodes][:1]
        if not likely:
            self._fail(Failure.of(JobError("the cluster has no node that lives.")))
        for node in likely:
            self._hosts.on(node)

    def _hear(self, host: Host, report: Report) -> None:
        match report:
            case AgentFailed(reason):
                self._lost(host, NodeLost(reason))
            case WorkersEnded():
                host.has_ended = True
            case StorageChecked(reason):
                self._check_reach(host, reason)
            case Started() | Exited() | SettingUp():
                self._hear_of_worker(host, report)
            case Ready() | Unprepared() | Interrupted():
                self._hear_of_preparation(host, report)
            case Remark():
                self._notices.append(report)

    def _hear_of_preparation(self, host: Host, report: Ready | Unprepared | Interrupted) -> None:
        """The first host speaks for all; what is wrong with another is told with its name."""
        match report:
            case Ready():
                host.is_prepared = True
                if not self._is_ready:  # what another finds is the same
                    self._is_ready = True
                    self._notices.append(report)
                    if self._settings.is_gang:
                        host.tell("end_workers")  # it will have none: what it has imported only takes memory
            case Unprepared(failure):
                told = with_remedy(failure, self._nodes.in_words(host.node))
                if self._is_ready:
                    told = told.at(message=f"host {self._nodes.in_words(host.node)}: {told.message}")
                self._notices.append(Unprepared(told))
            case Interrupted(reason) if self._is_ready and not host.is_prepared:
                self._lost(host, NodeLost(reason))  # it would never be: another node may
            case _:
                self._notices.append(report)

    def _check_reach(self, host: Host, reason: str) -> None:
        """A job whose first hosts cannot all save and load is not begun; later such a host is not used."""
        reason = self._reach.trouble_of(node_of(host.node), reason)
        if not reason:
            return
        told = (
            f"host {self._nodes.in_words(host.node)} does not reach the run's folder {self._reach.place}: {reason}. "
            "Set engine.storage to a folder that all hosts have mounted under the same path, or to an object store."
        )
        if not self._is_ready:
            self._fail(Failure.of(RequestError(told)))
            return
        if self._settings.is_gang:  # the next group may be given the same node, again and again
            self._notices.append(Unprepared(Failure.of(RequestError(told))))
            return
        self._nodes.barred.add(host.node)
        self._lost(host, HostLost(told))

    def _lost(self, host: Host, loss: HostLost) -> None:
        """Everything there is gone. Who was to be there goes elsewhere; who takes the place of the others is decided
        when it is known that they are gone."""
        if not self._hosts.drop(host):
            return
        if isinstance(loss, NodeLost):
            self._nodes.suspect(host.node)
        told = f"host {self._nodes.in_words(host.node)} is lost: {loss.message}"
        is_with_group = isinstance(loss, GroupLost)
        if not self._is_ending and not is_with_group:
            self._notices.append(Remark(told))
        for place in self._places.on(host.node):
            self._places.leave(place)
            if place.pid is not None:
                pid, place.pid = place.pid, None
                code = ENDED_WITH_ITS_GROUP if is_with_group else LOST_WITH_ITS_HOST
                self._notices.append(Exited(place.slot, pid, code))
        if not self._is_ready and not self._is_ending and not self._hosts.all:
            self._notices.append(Interrupted(told))

    # --- nodes that are taken away

    def _leave(self, node: Node) -> None:
        """Have everybody there leave in good order, and nobody else come: what they compute is not done again."""
        here = [host for host in self._hosts.all if node_of(host.node) == node.id]
        if not here:
            return
        left = None if node.deadline is None else max(0.0, node.deadline - time.time())
        when = "" if left is None else f" in {left:.0f} s"
        where = self._nodes.in_words(node.id)
        self._notices.append(Remark(f"host {where} is about to be taken away{when}: whoever is there leaves"))
        # A gang cannot do without one of its own: all save at the end of their step, and begin again elsewhere.
        is_with_gang = any(_is_of_gang(host) for host in here)
        for place in self._places.all if is_with_gang else self._places.on(node.id):
            if place.pid is None:
                self._places.leave(place)  # who was to be there goes elsewhere
            else:
                self._tell_worker("terminate", place.slot, place.pid)

    # --- workers

    def _send(self, place: Place, node: str) -> None:
        assert place.assignment is not None
        gpus = "" if place.room is None else place.room.gpus
        self._hosts.on(node).tell("start", replace(place.assignment, gpus=gpus))

    def _tell_worker(self, command: str, slot: int, pid: int) -> None:
        place = self._places.find(slot)
        host = None if place is None or place.node is None else self._hosts.find(place.node)
        if place is not None and place.pid == pid and host is not None:
            host.tell(command, slot, pid)

    def _hear_of_worker(self, host: Host, report: Started | Exited | SettingUp) -> None:
        """What is told of one that counts as gone is not passed on."""
        place = self._places.find(report.slot)
        if isinstance(report, Started):
            if place is None or place.node != host.node:
                host.tell("kill", report.slot, report.pid)  # somebody else has its place
                return
            place.assignment, place.pid = None, report.pid
            self._notices.append(replace(report, how=f"{report.how}, on host {self._nodes.in_words(host.node)}"))
        elif place is not None and place.node == host.node and place.pid == report.pid:
            if isinstance(report, Exited):
                place.pid, place.since = None, time.monotonic()
                if self._is_to_be_left(host):
                    self._places.leave(place)
            self._notices.append(report)

    def _is_to_be_left(self, host: Host) -> bool:
        """Whether nobody is to be started there any more; with a gang, because one of its nodes is taken away."""
        group = [one for one in self._hosts.all if _is_of_gang(one)] if _is_of_gang(host) else [host]
        return any(node_of(one.node) in self._nodes.avoided for one in group)


def _is_of_gang(host: Host) -> bool:
    return node_of(host.node) != host.node
