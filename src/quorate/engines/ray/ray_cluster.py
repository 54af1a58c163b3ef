"""A Ray cluster as a place for hosts: nodes, placement groups of one bundle, and an actor on each node in use.

The actor is a host's agent, called by Ray. Its fork server is a program of its own that it starts: nothing of Ray,
which has threads, is ever forked.
"""

import contextlib
import hmac
import logging
import os
import secrets
import select
import socket
import socketserver
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
from ray._private import state as ray_state
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from quorate.core.addresses import Network
from quorate.core.gpus import VISIBLE
from quorate.engines.ray.connection import connect, first_line, warn_without_token
from quorate.engines.ray.host import HostAgent, Report
from quorate.engines.ray.hosts import ClusterView, HostLost, Node, NodeLost, Room, node_of
from quorate.engines.ray.node_code import NodeCode, SentCode

log = logging.getLogger(__name__)

NODE = "ray.io/node-id"
GLANCE = 0.1
"""Seconds between two looks at a host's lifeline."""
PROBE = 0.5
"""Seconds within which a node that lives takes a connection."""
AGAIN = 0.1
"""Seconds until a host that could not be reached is asked again."""
GRACE = 5.0
"""Seconds more than asked for, that a report may take."""
CLOSE_PATIENCE = 20.0
NO_CODE = NodeCode()


class RayCluster:
    """Connects to a cluster by its address, as the job file has it. `demand` is what one worker takes, and `code` what
    nodes are given; a program that is connected already has said that itself, and its nodes have to have the rest."""

    def __init__(self, address: str, run_name: str, demand: Mapping[str, float], code: NodeCode = NO_CODE) -> None:
        self._address = address
        self._run_name = run_name
        self._demand = dict(demand)
        self._code = code
        self._sent: Path | None = None
        self._is_ours = False
        self._rooms: list[RayRoom] = []
        # Nodes that are about to be taken away, as of the last look.
        self._draining: frozenset[str] = frozenset()

    def connect(self) -> ClusterView:
        if ray.is_initialized():
            warn_without_token()
        else:
            connect(self._address, self._run_name, self._code)
            self._sent = self._code.root
            self._is_ours = True
        return self.look()

    def look(self) -> ClusterView:
        free = ray_state.available_resources_per_node()
        draining = ray_state.state.get_draining_nodes()  # by node, the deadline in milliseconds, 0 for none
        self._draining = frozenset(draining)
        nodes, cores = [], 0.0
        for one in ray.nodes():
            if one["Alive"]:
                id, deadline = one["NodeID"], draining.get(one["NodeID"])
                until = deadline / 1000 if deadline else None
                nodes.append(Node(id, one["NodeManagerAddress"], dict(free.get(id, {})), deadline is not None, until))
                cores += one["Resources"].get("CPU", 0.0)
        home = ray.get_runtime_context().get_node_id()
        address = next((node.address for node in nodes if node.id == home), ray.util.get_node_ip_address())
        return ClusterView(tuple(nodes), max(1, int(cores)), Network(address, host=home))

    def open_host(self, node: str) -> "RayHostLink":
        placed = host_class().options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        return RayHostLink(node, placed.remote(self._run_name, self._sent))

    def ask_room(self, node: str | None, avoid: frozenset[str]) -> Room:
        options: dict[str, Any] = {"strategy": "STRICT_PACK"}
        if node is not None:
            options["_soft_target_node_id"] = node
        if avoid:
            options["bundle_label_selector"] = [{NODE: f"!in({','.join(sorted(avoid))})"}]
        room = RayRoom(placement_group([self._demand], **options), self._demand.get("GPU", 0.0))
        self._rooms.append(room)
        return room

    def close(self) -> None:
        for room in self._rooms:
            with contextlib.suppress(Exception):  # the cluster may be gone, and takes them back by itself
                room.release()
        if self._is_ours:
            ray.shutdown()


class RayRoom:
    """A placement group of one bundle, so that each worker is placed, and placed again, on its own.

    Which GPUs a bundle has is known only to what Ray runs in it: a task asks there, before the room counts as found.
    """

    def __init__(self, group: PlacementGroup, gpus: float) -> None:
        self._group = group
        self._wanted_gpus = gpus
        self._asked: Any = None
        self._is_released = False
        self.gpus = ""

    def node(self) -> str | None:
        table = placement_group_table(self._group)
        if table.get("state") != "CREATED" or not self._knows_gpus():
            return None
        return str(table["bundles_to_node_id"][0])

    def _knows_gpus(self) -> bool:
        if not self._wanted_gpus or self.gpus:
            return True
        if self._asked is None:
            task = ray.remote(num_cpus=0, num_gpus=self._wanted_gpus)(gpus_given)
            self._asked = task.options(scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, 0)).remote()
        if ray.wait([self._asked], timeout=0)[0]:
            asked, self._asked = self._asked, None
            self.gpus = str(ray.get(asked))
        return bool(self.gpus)

    def release(self) -> None:
        if not self._is_released:
            self._is_released = True
            remove_placement_group(self._group)


def gpus_given() -> str:
    """In a task: the GPUs that Ray has set aside for it. Asked, since a cluster may be told to set no variable."""
    return ",".join(ray.get_runtime_context().get_accelerator_ids()["GPU"])


class RayHostLink:
    """Calls of a host's actor."""

    def __init__(self, node: str, actor: Any) -> None:
        self._node = node
        self._actor = actor
        self._lifeline: socket.socket | None = None
        self._lifeline_asked = actor.lifeline.remote()
        self._told: list[Any] = []
        self._turn = threading.Lock()
        self._is_closed = False

    def tell(self, command: str, *arguments: Any) -> None:
        with self._turn:
            self._told.append(self._actor.tell.remote(command, *arguments))

    def next(self, arrived: int, seconds: float) -> list[tuple[int, Report]]:
        try:
            self._hold_lifeline(seconds)
            reports: list[tuple[int, Report]] = self._answer(self._actor.next.remote(arrived, seconds), seconds)
            return reports
        except (ray.exceptions.ActorUnavailableError, TimeoutError) as error:
            if self._is_cut():
                raise self._lost("its process has ended") from None
            log.info("the host on node %s cannot be reached: %s", self._node[:8], first_line(error))
            time.sleep(AGAIN)
            return []
        except ray.exceptions.RuntimeEnvSetupError as error:
            raise HostLost(f"what engine.runtime_env asks for cannot be had there ({_why_not_had(error)})") from None
        except (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError) as error:
            raise self._lost(first_line(error)) from None

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(Exception):  # one that is gone is closed
            ray.get(self._actor.close.remote(), timeout=CLOSE_PATIENCE)
        self._end_process()
        with self._turn:
            if self._lifeline is not None:
                self._lifeline.close()

    def _end_process(self) -> None:
        with contextlib.suppress(Exception):
            ray.kill(self._actor)

    def _answer(self, asked: Any, seconds: float) -> Any:
        """What a call returns, which may take so many seconds; looks meanwhile whether anybody is there."""
        over = time.monotonic() + seconds + GRACE
        while not ray.wait([asked], timeout=GLANCE)[0]:
            if self._is_closed:
                raise HostLost("it was let go")
            if self._is_cut():
                raise self._lost("its process has ended")
            self._check_commands()
            if time.monotonic() > over:
                raise TimeoutError(f"it has not answered for {seconds + GRACE:.0f} s")
        return ray.get(asked)

    def _check_commands(self) -> None:
        """A command that has not arrived is not sent again, since those after it may have: the host counts as lost."""
        with self._turn:
            if not self._told:
                return
            done, self._told = ray.wait(self._told, num_returns=len(self._told), timeout=0)
        for told in done:
            try:
                ray.get(told)
            except ray.exceptions.ActorUnavailableError as error:
                raise HostLost(f"a command did not reach it ({first_line(error)})") from None

    def _hold_lifeline(self, seconds: float) -> None:
        if self._lifeline_asked is None:
            return
        address, token = self._answer(self._lifeline_asked, seconds)
        self._lifeline_asked = None
        try:
            with contextlib.ExitStack() as opened:
                lifeline = opened.enter_context(socket.create_connection(address, timeout=PROBE))
                lifeline.sendall(token)
                opened.pop_all()
        except OSError as error:  # from outside of the cluster's network, say: Ray tells it as well, later
            log.info("the host on node %s cannot be reached directly: %s", self._node[:8], error)
            return
        with self._turn:
            self._lifeline = lifeline
            if self._is_closed:
                lifeline.close()

    def _is_cut(self) -> bool:
        """Whether the host's process is gone: it never says anything, so there is only an end to be read."""
        if self._lifeline is None:
            return False
        look = select.poll()  # select() knows no file beyond the first 1,024 of a process
        try:
            look.register(self._lifeline, select.POLLIN)
            return bool(look.poll(0))
        except (OSError, ValueError):
            return True

    def _lost(self, reason: str) -> HostLost:
        return HostLost(reason) if _lives(node_of(self._node)) else NodeLost(reason)


def _lives(node: str) -> bool:
    """Whether a node takes connections, which is known before Ray's own health checks have failed."""
    with contextlib.suppress(Exception):
        for one in ray.nodes():
            if one["NodeID"] == node and one["Alive"]:
                socket.create_connection((one["NodeManagerAddress"], one["NodeManagerPort"]), timeout=PROBE).close()
                return True
    return False


def _why_not_had(error: Exception) -> str:
    """The last line that pip or Ray has said."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("ERROR:")] or lines or [type(error).__name__]
    return said[-1].rstrip(".")


# --- the actor on a node

COMMANDS, REPORTS, ENDS = "commands", "reports", "ends"
"""Calls of one group are carried out one after the other, in their order; those of the others do not wait for them."""


SPEAK_WITHIN = 10.0
"""Seconds within which whoever connects to a lifeline shows its token."""


def host_class() -> Any:
    """What hosts are made of. They take no resources: those are held by whoever decides where workers run."""
    return ray.remote(num_cpus=0, concurrency_groups={COMMANDS: 1, REPORTS: 2, ENDS: 1})(RayHost)


class RayHost:
    """Lives as long as the process that has started it, Ray sees to that.

    Of the folder `sent` on the launcher's machine this process stands in a copy. `gpus` are those that its workers may
    use, if not all.
    """

    def __init__(self, run_name: str, sent: Path | None = None, gpus: str | None = None) -> None:
        if gpus is not None:
            os.environ[VISIBLE] = gpus
        self._has_ended = threading.Event()
        self._code = SentCode(sent)
        network = Network(ray.util.get_node_ip_address(), host=ray.get_runtime_context().get_node_id())
        self._agent = HostAgent(run_name, network)
        self._lifeline = Lifeline(network.address)

    @ray.method(concurrency_group=REPORTS)  # type: ignore[untyped-decorator]
    def lifeline(self) -> tuple[tuple[str, int], bytes]:
        """Where a connection ends at the moment that this process does, and the token with which it has to begin."""
        return self._lifeline.address, self._lifeline.token

    @ray.method(concurrency_group=REPORTS)  # type: ignore[untyped-decorator]
    def next(self, arrived: int, seconds: float) -> list[tuple[int, Report]]:
        return self._agent.next(arrived, seconds)

    @ray.method(concurrency_group=COMMANDS)  # type: ignore[untyped-decorator]
    def tell(self, command: str, *arguments: Any) -> None:
        if command == "prepare":
            arguments = (self._code.moved(*arguments),)
        self._agent.tell(command, *arguments)

    @ray.method(concurrency_group=COMMANDS)  # type: ignore[untyped-decorator]
    def close(self) -> None:
        self._agent.close()
        self._has_ended.set()

    @ray.method(concurrency_group=ENDS)  # type: ignore[untyped-decorator]
    def await_end(self) -> None:
        """Wait until it was closed."""
        self._has_ended.wait()


class Lifeline(socketserver.ThreadingTCPServer):
    """Holds the connections of those who begin with its token, and says nothing. Ray itself needs seconds to learn that
    a process is gone with its node, and a kernel closes its connections at once."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str) -> None:
        super().__init__((host, 0), _Holding)
        self.token = secrets.token_bytes(32)
        self.address: tuple[str, int] = self.socket.getsockname()[:2]
        threading.Thread(target=self.serve_forever, name="lifeline", daemon=True).start()


class _Holding(socketserver.BaseRequestHandler):
    """One who has connected: a stranger is hung up on, once it has spoken or been silent for too long."""

    def handle(self) -> None:
        assert isinstance(self.server, Lifeline)
        with contextlib.suppress(OSError):
            self.request.settimeout(SPEAK_WITHIN)
            if hmac.compare_digest(self.request.recv(len(self.server.token)), self.server.token):
                self.request.settimeout(None)
                self.request.recv(1)  # to its end: it has nothing more to say
