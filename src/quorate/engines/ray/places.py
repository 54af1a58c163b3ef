"""The places of a job's workers in a cluster: room for each is asked for, waited for, kept and given back."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quorate.core.failure import Failure
from quorate.core.generation import name_of
from quorate.engines.engine import Notice, Remark, Unprepared
from quorate.engines.ray.hosts import Calls, Cluster, ClusterFailed, ClusterView, Hosts, Node, Nodes, Room
from quorate.worker.assignment import Assignment

log = logging.getLogger(__name__)

LOOK_AT_NODES = 1.0
"""Seconds between two looks at the nodes, while nobody waits for room."""
SAY_WAITING = 3.0
"""Seconds after which it is said that somebody waits for room..."""
SAY_GANG_WAITING = 30.0
"""...or a whole gang, which takes longer to start."""
KEEP_ROOM = 10.0
"""Seconds for which the room of a worker that has ended is kept for the next in its place."""
ASK_AGAIN = 1.0
"""Seconds after which a cluster that has failed is asked again."""


@dataclass(frozen=True)
class ClusterSettings:
    """What each worker takes, how workers are shared out, how many there are at first, and where the run is kept.

    `is_gang`: the cluster itself starts hosts for all workers together, and starts all anew when one is lost.
    """

    demand: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    placement: str = "spread"
    workers: int = 1
    # A folder that all hosts have mounted; without it they reach the run's own.
    storage: Path | None = None
    is_gang: bool = False


@dataclass(eq=False)
class Place:
    """A worker's place: who is to be there, the room for it, and the process that is."""

    slot: int
    assignment: Assignment | None = None
    room: Room | None = None
    # Where that was asked for, and where it is.
    target: str | None = None
    node: str | None = None
    pid: int | None = None
    since: float = 0.0
    is_told: bool = False


@dataclass(frozen=True)
class _Look:
    """What one look at the cluster has found: the nodes, if it was at these; room for a place, on the node that was
    chosen for it; and where the rooms are that were waited for."""

    view: ClusterView | None
    asked: tuple[Place, str | None, Room] | None
    found: list[tuple[Place, Room, str | None]]


class Places:
    """`found` is called with a place, and who waits for it, that has a node now. What users should know, and that there
    will never be room, is added to `notices`. Of a gang all get room together, or none."""

    def __init__(
        self,
        cluster: Cluster,
        calls: Calls,
        nodes: Nodes,
        hosts: Hosts,
        settings: ClusterSettings,
        notices: list[Notice],
        found: Callable[[Place, str], None],
    ) -> None:
        self._cluster = cluster
        self._calls = calls
        self._nodes = nodes
        self._hosts = hosts
        self._settings = settings
        self._notices = notices
        self._found = found
        self._places: dict[int, Place] = {}
        self._is_looking = False
        self._nodes_due = 0.0
        self._rests_until = 0.0
        self._complaint = ""

    def find(self, slot: int) -> Place | None:
        return self._places.get(slot)

    @property
    def all(self) -> list[Place]:
        return list(self._places.values())

    def on(self, node: str) -> list[Place]:
        return [place for place in self._places.values() if place.node == node]

    def fill(self, assignment: Assignment) -> None:
        """Have a worker in its place as soon as there is room."""
        place = self._places.setdefault(assignment.slot, Place(assignment.slot))
        place.assignment, place.since, place.is_told = assignment, time.monotonic(), False
        if place.node is not None:
            self._found(place, place.node)
        else:
            self._look_at_cluster(place.since)

    def leave(self, place: Place) -> None:
        """Give its room back."""
        room, place.room, place.node, place.target = place.room, None, None, None
        if room is not None:
            self._calls.call(room.release, failed=lambda failure: log.info("room is still held: %s", failure.message))

    def end(self) -> None:
        """Nobody is waited for any more."""
        for place in self._places.values():
            place.assignment = None

    def look(self, now: float) -> None:
        """Once in a while: at the nodes, whether those who wait have room now, and whose room nobody needs any more."""
        self._look_at_cluster(now)
        gang = self._settings.workers if self._settings.is_gang else 0
        for place in self._places.values():
            if place.assignment is not None and place.node is None and not place.is_told:
                place.is_told = now - place.since > (SAY_GANG_WAITING if gang else SAY_WAITING)
                # One speaks for a gang, and each for itself that has no place in it.
                if place.is_told and (place.slot == 0 or place.slot >= gang):
                    self._notices.append(Remark(self._waiting_in_words(place.slot)))
            is_empty = place.room is not None and place.assignment is None and place.pid is None
            if is_empty and now - place.since > KEEP_ROOM:
                self.leave(place)

    def _look_at_cluster(self, now: float) -> None:
        """One look at a time, and room for one place: where the next goes depends on those before."""
        roomless = [place for place in self._places.values() if place.assignment is not None and place.room is None]
        held = [(place, place.room) for place in self._places.values() if place.room is not None]
        pending = [(place, room) for place, room in held if place.node is None]
        is_due = now >= self._nodes_due
        if self._nodes.view is None or self._is_looking or now < self._rests_until:
            return
        if not (roomless or pending or is_due):
            return
        self._is_looking = True
        placed = [node for place, _ in held if (node := place.node or place.target) is not None]
        unshown = [place.target for place, _ in pending if place.target is not None]
        avoid, ready = self._nodes.avoided, {host.node for host in self._hosts.all}
        demand, placement = self._settings.demand, self._settings.placement

        def look() -> _Look:
            view = self._cluster.look() if roomless or is_due else None
            asked = None
            if roomless and view is not None:
                node = choose_node(view.nodes, demand, placed, unshown, placement, avoid, ready)
                apart = frozenset(placed) if placement == STRICT_SPREAD else frozenset()
                asked = roomless[0], node, self._cluster.ask_room(node, avoid | apart)
            return _Look(view, asked, [(place, room, room.node()) for place, room in pending])

        self._calls.call(look, self._seen, self._failed)

    def _seen(self, seen: _Look) -> None:
        self._is_looking = False
        self._complaint = ""
        now = time.monotonic()
        if seen.view is not None:
            self._nodes.see(seen.view)
            self._nodes_due = now + LOOK_AT_NODES
        for place, room, node in seen.found:
            if node is None or place.room is not room or place.node is not None:
                continue
            if node in self._nodes.avoided:
                self.leave(place)
                continue
            place.node = node
            if place.assignment is not None:
                self._found(place, node)
        if seen.asked is not None:
            place, place.target, place.room = seen.asked
            self._look_at_cluster(now)

    def _failed(self, failure: Failure) -> None:
        """It may pass, and who waits goes on waiting: said once, not each time."""
        self._is_looking = False
        self._rests_until = time.monotonic() + ASK_AGAIN
        if failure.kind == ClusterFailed.__name__:
            self._notices.append(Unprepared(failure))
        elif not any(place.assignment is not None and place.node is None for place in self._places.values()):
            log.info("the nodes could not be looked at: %s", failure.message)
        elif failure.message != self._complaint:
            self._complaint = failure.message
            self._notices.append(Remark(failure.message))

    def _waiting_in_words(self, slot: int) -> str:
        settings, nodes = self._settings, () if self._nodes.view is None else self._nodes.view.nodes
        # Of what is asked for: a cluster counts much else, and under names of its own.
        here = [(node.address, {what: node.free.get(what, 0.0) for what in settings.demand}) for node in nodes]
        free = "; ".join(f"{address}: {in_words(left)}" for address, left in here) or "no node"
        if settings.is_gang and slot >= settings.workers:
            return (
                f"{name_of(slot)} has no place: the gang was started with {settings.workers}. Stop the job, and resume"
                " it with more workers."
            )
        if settings.is_gang:
            wanted = f"{settings.workers} times {in_words(settings.demand)}"
            return f"the gang waits for {wanted}, which it takes together: free in the cluster is {free}."
        return (
            f"{name_of(slot)} waits for {in_words(settings.demand)}: free in the cluster is {free}."
            " The others train meanwhile."
        )


SPREAD, PACK, STRICT_SPREAD = "spread", "pack", "strict_spread"


def fits(node: Node, demand: Mapping[str, float], used: int = 0) -> bool:
    """Whether a node has room for one more, besides `used` that its account does not show yet."""
    return all(node.free.get(what, 0.0) >= amount * (used + 1) for what, amount in demand.items() if amount > 0)


def choose_node(
    nodes: Sequence[Node],
    demand: Mapping[str, float],
    placed: Sequence[str],
    pending: Sequence[str],
    strategy: str,
    avoid: Collection[str] = (),
    ready: Collection[str] = (),
) -> str | None:
    """The node for one more worker; None where no node has room.

    `placed` are the nodes of the workers that there are, once for each, and `pending` those of them that the free
    resources do not show yet. Among equals those that are `ready`, since a host is there already, come first.
    """
    workers, unshown = Counter(placed), Counter(pending)
    able = [
        node
        for node in nodes
        if node.id not in avoid
        and fits(node, demand, unshown[node.id])
        and not (strategy == STRICT_SPREAD and workers[node.id])
    ]
    if not able:
        return None
    crowd = -1 if strategy == PACK else 1

    def rank(node: Node) -> tuple[float, bool, float, str]:
        return crowd * workers[node.id], node.id not in ready, -node.free.get("CPU", 0.0), node.id

    return min(able, key=rank).id


def likely_nodes(
    nodes: Sequence[Node], demand: Mapping[str, float], workers: int, strategy: str, most: int = 16
) -> list[str]:
    """The nodes that so many workers will probably be placed on, in the order of their use."""
    chosen: list[str] = []
    for _ in range(workers):
        node = choose_node(nodes, demand, chosen, chosen, strategy)
        if node is None or len(set(chosen) | {node}) > most:
            break
        chosen.append(node)
    return list(dict.fromkeys(chosen))


def in_words(demand: Mapping[str, float]) -> str:
    """What one worker asks for, or what a node has of that, as in ``{CPU: 2, GPU: 1}``."""
    words = [f"{what}: {amount:g}" for what, amount in demand.items() if amount > 0]
    return f"{{{', '.join(words)}}}" if words else "nothing"
