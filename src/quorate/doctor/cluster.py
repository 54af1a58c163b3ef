"""What `quorate doctor --engine ray` says of a cluster: versions, resources and clocks of its nodes, the way between
every two, and shared storage.

A probe on each node reads them. It is sent there as it stands, since the node may have no Quorate: so it uses nothing
but Python's own. Ray is imported only when a cluster is read.
"""

import contextlib
import importlib.metadata
import platform
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

from quorate.core.errors import LinkError
from quorate.doctor.report import Finding, Level
from quorate.engines.ray.shared_storage import Reach
from quorate.observe.quantities import plural, some_of

CLOCK_S = 1.0
"""Clocks that are apart by more make times of events hard to compare."""
SLOW = 12.5e6
"""Bytes a second: 100 Mbit/s. With less, a step of most models waits for the network."""
SHOWN = 4
PATIENCE = 60.0
ROUNDS = 5
SENT = 32 * 2**20
PIECE = 2**20
CONNECT_S = 5.0


@dataclass(frozen=True)
class NodeReading:
    """What was found out on one node; `trouble` where it did not answer."""

    name: str
    versions: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)
    clock_offset_s: float = 0.0
    # The offset is known to within half of it.
    round_trip_s: float = 0.0
    storage_trouble: str = ""
    trouble: str = ""


@dataclass(frozen=True)
class WayReading:
    """What was found out on the way from one node to another."""

    sender: str
    receiver: str
    bytes_per_second: float = 0.0
    trouble: str = ""


@dataclass(frozen=True)
class ClusterReading:
    """All that was found out; `storage` is the folder that was looked for, if one was."""

    nodes: Sequence[NodeReading]
    ways: Sequence[WayReading] = ()
    storage: str | None = None


def judge(cluster: ClusterReading, here: Mapping[str, str]) -> list[Finding]:
    """What to say of a cluster; `here` are the versions of the machine that asks."""
    silent = [node for node in cluster.nodes if node.trouble]
    heard = [node for node in cluster.nodes if not node.trouble]
    found = [_nodes(heard, silent)]
    if heard:
        found += [*_versions(heard, here), _clocks(heard), _ways(heard, cluster.ways)]
        found += [] if cluster.storage is None else [_storage(heard, cluster.storage)]
    return found


def _nodes(heard: Sequence[NodeReading], silent: Sequence[NodeReading]) -> Finding:
    if silent:
        who = some_of([f"{node.name} ({node.trouble})" for node in silent], SHOWN)
        text = f"{plural(len(silent), 'node')} of {len(heard) + len(silent)} did not answer: {who}"
        return Finding("nodes", Level.PROBLEM, text, "Look at `ray status`, and at the logs of Ray on that node.")
    if not heard:
        return Finding("nodes", Level.PROBLEM, "the cluster has no node", "Start one: ray start --head")
    together = {name: sum(node.resources.get(name, 0.0) for node in heard) for name in ("CPU", "GPU")}
    counted = ", ".join(f"{amount:g} {name}s" for name, amount in together.items() if amount)
    names = some_of([node.name for node in heard], SHOWN)
    text = f"{plural(len(heard), 'node')} with {counted or 'nothing to compute on'}: {names}"
    level = Level.OK if counted else Level.PROBLEM
    return Finding("nodes", level, text, "" if counted else "Start nodes with CPUs: ray start --num-cpus N")


def _versions(nodes: Sequence[NodeReading], here: Mapping[str, str]) -> list[Finding]:
    found = []
    for name in ("python", "ray", "torch", "quorate"):
        other = [node for node in nodes if node.versions.get(name, "") != here.get(name, "")]
        mine = here.get(name) or "not installed"
        title = f"{name} on nodes"
        if not other:
            found.append(Finding(title, Level.OK, f"{mine}, as here"))
            continue
        theirs = some_of([f"{node.versions.get(name) or 'not installed'} on {node.name}" for node in other], SHOWN)
        remedy = {
            "python": "Ray refuses nodes and drivers of other Python versions: use the same everywhere.",
            "ray": f"Ray refuses other versions of itself: pip install ray=={mine} there.",
            "torch": f"Workers with other versions are refused, since bits differ: pip install torch=={mine} there.",
            "quorate": "Install the same there: a node without it cannot run a worker.",
        }[name]
        found.append(Finding(title, Level.PROBLEM, f"{mine} here, and {theirs}", remedy))
    return found


def _clocks(nodes: Sequence[NodeReading]) -> Finding:
    worst = max(nodes, key=lambda node: abs(node.clock_offset_s) - node.round_trip_s / 2)
    apart = abs(worst.clock_offset_s)
    if apart - worst.round_trip_s / 2 <= CLOCK_S:
        return Finding("clocks of nodes", Level.OK, f"within {max(apart, worst.round_trip_s / 2):.3f} s of this one")
    where = "ahead of" if worst.clock_offset_s > 0 else "behind"
    text = f"that of {worst.name} is {apart:.1f} s {where} this one"
    remedy = "Run chrony or ntpd on all nodes. Training does not depend on it; times of events and traces do."
    return Finding("clocks of nodes", Level.WARNING, text, remedy)


def _ways(nodes: Sequence[NodeReading], ways: Sequence[WayReading]) -> Finding:
    name = "ways between nodes"
    if not ways:
        return Finding(name, Level.OK, "there is one node: nothing goes over the network")
    if broken := [way for way in ways if way.trouble]:
        which = some_of([f"{way.sender} to {way.receiver} ({way.trouble})" for way in broken], SHOWN)
        text = f"{len(broken)} of {len(ways)} do not work: {which}"
        return Finding(name, Level.PROBLEM, text, "Let nodes reach each other on all ports; look at firewalls.")
    slowest = min(ways, key=lambda way: way.bytes_per_second)
    speed = f"{slowest.bytes_per_second / 1e6:,.0f} MB/s, from {slowest.sender} to {slowest.receiver}"
    if slowest.bytes_per_second < SLOW:
        remedy = "A step sends about twice the model: use fewer nodes (placement: pack), or strategy.compress."
        return Finding(
            name, Level.WARNING, f"all {len(nodes)} nodes reach each other; the slowest way has {speed}", remedy
        )
    return Finding(name, Level.OK, f"all {len(nodes)} nodes reach each other; the slowest way has {speed}")


def _storage(nodes: Sequence[NodeReading], folder: str) -> Finding:
    apart = [node for node in nodes if node.storage_trouble]
    if apart:
        who = some_of([f"{node.name} ({node.storage_trouble})" for node in apart], SHOWN)
        text = f"{folder} is not shared with {plural(len(apart), 'node')}: {who}"
        remedy = "Name a folder that is mounted on all of them, and writable: engine.storage"
        return Finding("storage of nodes", Level.PROBLEM, text, remedy)
    return Finding("storage of nodes", Level.OK, f"{folder} is read and written by {plural(len(nodes), 'node')}")


# --- on a node


class NodeProbe:
    """Looks at its own node, listens for the others, and sends to them."""

    def __init__(self) -> None:
        # A port that is open to all of the network swallows nothing from whoever does not know this.
        self._token = secrets.token_bytes(16)

    def versions(self) -> dict[str, str]:
        found = {"python": platform.python_version()}
        for name in ("ray", "torch", "quorate"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(name)
        return found

    def clock(self) -> float:
        return time.time()

    def listen(self, host: str) -> tuple[str, int, bytes]:
        """Swallow what others send, from now on; where, and with which word it begins."""
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        threading.Thread(target=self._swallow, args=(listener,), daemon=True).start()
        return host, listener.getsockname()[1], self._token

    def send(self, host: str, port: int, token: bytes, size: int) -> tuple[float, str]:
        """Send so many bytes to another node; how many a second arrived, or why none did."""
        try:
            with socket.create_connection((host, port), timeout=CONNECT_S) as connection:
                connection.settimeout(CONNECT_S * 2)
                connection.sendall(token)
                piece, began = bytes(PIECE), time.perf_counter()
                for _ in range(size // PIECE):
                    connection.sendall(piece)
                connection.shutdown(socket.SHUT_WR)
                if connection.recv(1) != b"!":  # not before all of it is there
                    return 0.0, "another process listens there"
                return size / max(time.perf_counter() - began, 1e-9), ""
        except OSError as error:
            return 0.0, error.strerror or str(error)

    def why_out_of_reach(self, place: str, nonce: str, host: str) -> str:
        """What is wrong with a storage that a job would keep its run in; by Quorate's own check, if that is there."""
        try:
            from quorate.engines.ray.shared_storage import why_out_of_reach
        except ImportError:
            return "Quorate is not installed there"
        return why_out_of_reach(place, nonce, host)

    def _swallow(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.settimeout(CONNECT_S * 2)
                if connection.recv(len(self._token), socket.MSG_WAITALL) == self._token:
                    while connection.recv(PIECE):
                        pass
                    connection.sendall(b"!")


# --- on the machine that asks


def read_cluster(address: str, storage: str | None) -> ClusterReading:
    """Look at each node, at the way between every two, and for the storage on each."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from quorate.engines.ray.connection import connect
    from quorate.engines.ray.node_code import NodeCode

    connect(address, "doctor", NodeCode(), "--address")
    reach = None
    try:
        reach = None if storage is None else Reach(storage)
        nodes = [node for node in ray.nodes() if node["Alive"]]
        # By value: a node without Quorate can tell that it has none.
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        try:
            make = ray.remote(NodeProbe)
            places = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
            probes = [make.options(num_cpus=0, scheduling_strategy=place).remote() for place in places]
        finally:
            ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
        readings = [_read(node, probe, reach) for node, probe in zip(nodes, probes, strict=True)]
        heard = [
            (reading, probe, str(node["NodeManagerAddress"]))
            for reading, probe, node in zip(readings, probes, nodes, strict=True)
            if not reading.trouble
        ]
        return ClusterReading(readings, _read_ways(heard), storage)
    finally:
        if reach is not None:
            reach.close()
        ray.shutdown()


def _ask(method: Any, *arguments: Any) -> Any:
    """What a probe answers. Raises LinkError where it does not."""
    import ray

    try:
        return ray.get(method.remote(*arguments), timeout=PATIENCE)
    except ray.exceptions.GetTimeoutError:
        raise LinkError(f"no answer within {PATIENCE:g} s") from None
    except (ray.exceptions.RayError, OSError) as error:
        raise LinkError((str(error).strip().splitlines() or [type(error).__name__])[-1]) from None


def _read(node: Mapping[str, Any], probe: Any, reach: Reach | None) -> NodeReading:
    name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}, {node['NodeID'][:8]})"
    reading = NodeReading(name, resources={key: float(value) for key, value in node["Resources"].items()})
    try:
        reading = replace(reading, versions=_ask(probe.versions))
        round_trip, offset = min(_offsets(probe))
        reading = replace(reading, clock_offset_s=offset, round_trip_s=round_trip)
        if reach is not None:
            said = _ask(probe.why_out_of_reach, reach.place, reach.nonce, node["NodeID"])
            reading = replace(reading, storage_trouble=reach.trouble_of(node["NodeID"], said))
    except LinkError as error:
        return replace(reading, trouble=str(error))
    return reading


def _offsets(probe: Any) -> Iterator[tuple[float, float]]:
    """Round trips, and how far its clock was ahead if both ways took as long: the shortest tells best."""
    for _ in range(ROUNDS):
        began = time.time()
        there = _ask(probe.clock)
        ended = time.time()
        yield ended - began, there - (began + ended) / 2


def _read_ways(heard: Sequence[tuple[NodeReading, Any, str]]) -> list[WayReading]:
    """One after the other: two at a time would share what the network has."""
    ways = []
    listening: dict[str, Any] = {}
    for (sender, probe, _), (receiver, other, address) in permutations(heard, 2):
        try:
            if receiver.name not in listening:
                listening[receiver.name] = _ask(other.listen, address)
            speed, trouble = _ask(probe.send, *listening[receiver.name], SENT)
        except LinkError as error:
            speed, trouble = 0.0, str(error)
        ways.append(WayReading(sender.name, receiver.name, speed, trouble))
    return ways
