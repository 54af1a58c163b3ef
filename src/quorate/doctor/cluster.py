"""What the readings of a cluster's nodes come to: versions, resources, clocks, ways between nodes, shared storage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quorate.doctor.report import Finding, Level
from quorate.observe.quantities import plural, some_of

CLOCK_S = 1.0
"""Clocks that are apart by more make times of events hard to compare."""
SLOW = 12.5e6
"""Bytes a second: 100 Mbit/s. With less, a step of most models waits for the network."""
SHOWN = 4


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
