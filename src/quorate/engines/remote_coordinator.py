"""Coordinators on other hosts: where each is, and what whoever replaces a dead one holds of it."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from quorate.core.errors import JobError
from quorate.core.failure import Failure
from quorate.engines.host import CoordinatorAnswered, CoordinatorEnded
from quorate.engines.hosts import Host, Hosts, Nodes

KILL_PATIENCE = 5.0
"""Seconds for which the end of one that was killed is waited for. A host that does not answer may still have it; it is
fenced by its incarnation."""


class RemoteCoordinator:
    """Fulfils `CoordinatorChild`. `end` has it end on its host, within so many seconds."""

    def __init__(self, number: int, end: Callable[["RemoteCoordinator", float], None]) -> None:
        self.number = number
        self.pid = 0
        self._end = end
        self._changed = threading.Condition()
        self._answer: dict[str, Any] = {}
        self._failure: Failure | None = None
        self._departure: str | None = None

    def answered(self, pid: int, answer: dict[str, Any], failure: Failure | None) -> None:
        """It is there, and listens if there is an answer, or cannot."""
        with self._changed:
            self.pid, self._answer, self._failure = pid, answer, failure
            self._changed.notify_all()

    def ended(self, departure: str) -> None:
        """It is gone, or counts as that."""
        with self._changed:
            self._departure = self._departure or departure
            self._changed.notify_all()

    def await_answer(self, limit: float | None = None) -> dict[str, Any]:
        with self._changed:
            self._changed.wait_for(lambda: self._answer or self._failure or self._departure, limit)
            # The failure says more than the end that follows it, and comes first.
            answer, failure, departure = self._answer, self._failure, self._departure
        if failure is not None:
            raise failure.error()
        if not answer and departure is not None:
            raise JobError(f"{departure} before it listened.")
        return answer

    @property
    def is_alive(self) -> bool:
        return self._departure is None

    @property
    def departure(self) -> str:
        return self._departure or f"the coordinator (pid {self.pid}) lives"

    def kill(self) -> None:
        self._finish(0.0)

    def close(self, patience: float) -> None:
        self._finish(patience)

    def _finish(self, patience: float) -> None:
        if self._departure is not None:
            return
        self._end(self, patience)
        with self._changed:
            if not self._changed.wait_for(lambda: self._departure is not None, patience + KILL_PATIENCE):
                self._departure = f"the coordinator (pid {self.pid}) was to end, and its host does not answer"


class Coordinators:
    """Places coordinators on hosts. Changed in the loop's thread alone. `stays_home`: on no other than the launcher's,
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
        return any(child.is_alive for child, _ in list(self._placed.values()))

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
