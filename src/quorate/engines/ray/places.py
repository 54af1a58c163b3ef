"""The places of a job's workers in a cluster: room for each is asked for, waited for, kept and given back."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from quorate.core.failure import Failure
from quorate.core.generation import name_of
from quorate.engines.ray.cluster import Calls, Cluster, ClusterFailed, ClusterView, Node, Room
from quorate.engines.ray.hosts import Nodes
from quorate.worker.assignment import Assignment

SAY_WAITING = 3.0
"""Seconds after which it is said that somebody waits for room..."""
SAY_GANG_WAITING = 30.0
"""...or a whole gang, which takes longer to start."""
KEEP_ROOM = 10.0
"""Seconds for which the room of a worker that has ended is kept for the next in its place."""
ASK_AGAIN = 1.0
"""Seconds after which a cluster that has failed is asked again."""


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


class Places:
    """`found` is called with a place, and who waits for it, that has a node now;
    `say` with what users should know, and `give_up` if there will never be room; `ready` gives the nodes that have a
    host already. `gang`: so many get room together, or none."""

    def __init__(
        self,
        cluster: Cluster,
        calls: Calls,
        nodes: Nodes,
        demand: Mapping[str, float],
        strategy: str,
        ready: Callable[[], set[str]],
        found: Callable[[Place, str], None],
        say: Callable[[str], None],
        give_up: Callable[[Failure], None],
        gang: int = 0,
    ) -> None:
        self._cluster = cluster
        self._calls = calls
        self._nodes = nodes
        self._demand = demand
        self._strategy = strategy
        self._ready = ready
        self._found = found
        self._say = say
        self._give_up = give_up
        self._gang = gang
        self._places: dict[int, Place] = {}
        self._is_asking = False
        self._is_looking = False
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
            self._ask_room(place.since)

    def leave(self, place: Place) -> None:
        """Give its room back."""
        room, place.room, place.node, place.target = place.room, None, None, None
        if room is not None:
            self._calls.call(room.release, failed=self._failed)

    def end(self) -> None:
        """Nobody is waited for any more."""
        for place in self._places.values():
            place.assignment = None

    def look(self, now: float) -> None:
        """Once in a while: whether those who wait have room now, and whose is not needed any more."""
        self._ask_room(now)
        self._look_for_room(now)
        for place in self._places.values():
            if place.assignment is not None and place.node is None and not place.is_told:
                place.is_told = now - place.since > (SAY_GANG_WAITING if self._gang else SAY_WAITING)
                # One speaks for a gang, and each for itself that has no place in it.
                if place.is_told and (place.slot == 0 or place.slot >= self._gang):
                    self._say(self._waiting_in_words(place.slot))
            is_empty = place.room is not None and place.assignment is None and place.pid is None
            if is_empty and now - place.since > KEEP_ROOM:
                self.leave(place)

    def _ask_room(self, now: float) -> None:
        """For one after the other: where the next goes depends on those before."""
        waiting = (one for one in self._places.values() if one.assignment is not None and one.room is None)
        place = next(waiting, None)
        if place is None or self._is_asking or now < self._rests_until:
            return
        self._is_asking = True
        others = [one for one in self._places.values() if one.room is not None]
        placed = [node for one in others if (node := one.node or one.target) is not None]
        pending = [one.target for one in others if one.node is None and one.target is not None]
        avoid, ready = self._nodes.avoided, self._ready()

        def ask() -> tuple[ClusterView, str | None, Room]:
            view = self._cluster.look()
            node = choose_node(view.nodes, self._demand, placed, pending, self._strategy, avoid, ready)
            apart = frozenset(placed) if self._strategy == STRICT_SPREAD else frozenset()
            return view, node, self._cluster.ask_room(node, avoid | apart)

        self._calls.call(ask, partial(self._asked, place), self._not_asked)

    def _asked(self, place: Place, answer: tuple[ClusterView, str | None, Room]) -> None:
        self._is_asking = False
        self._complaint = ""
        self._nodes.view, place.target, place.room = answer
        self._ask_room(time.monotonic())

    def _not_asked(self, failure: Failure) -> None:
        self._is_asking = False
        self._failed(failure)

    def _look_for_room(self, now: float) -> None:
        waiting = [
            (place, place.room) for place in self._places.values() if place.room is not None and place.node is None
        ]
        if not waiting or self._is_looking or now < self._rests_until:
            return
        self._is_looking = True
        self._calls.call(lambda: [(place, room, room.node()) for place, room in waiting], self._seen, self._not_seen)

    def _seen(self, rooms: list[tuple[Place, Room, str | None]]) -> None:
        self._is_looking = False
        self._complaint = ""
        for place, room, node in rooms:
            if node is None or place.room is not room or place.node is not None:
                continue
            if node in self._nodes.avoided:
                self.leave(place)
                continue
            place.node = node
            if place.assignment is not None:
                self._found(place, node)

    def _not_seen(self, failure: Failure) -> None:
        self._is_looking = False
        self._failed(failure)

    def _failed(self, failure: Failure) -> None:
        """It may pass, and who waits goes on waiting: said once, not each time."""
        self._rests_until = time.monotonic() + ASK_AGAIN
        if failure.kind == ClusterFailed.__name__:
            self._give_up(failure)
            return
        if failure.message != self._complaint:
            self._complaint = failure.message
            self._say(failure.message)

    def _waiting_in_words(self, slot: int) -> str:
        nodes = () if self._nodes.view is None else self._nodes.view.nodes
        # Of what is asked for: a cluster counts much else, and under names of its own.
        here = [(node.address, {what: node.free.get(what, 0.0) for what in self._demand}) for node in nodes]
        free = "; ".join(f"{address}: {in_words(left)}" for address, left in here) or "no node"
        if self._gang and slot >= self._gang:
            return (
                f"{name_of(slot)} has no place: the gang was started with {self._gang}. Stop the job, and resume it"
                " with more workers."
            )
        if self._gang:
            wanted = f"{self._gang} times {in_words(self._demand)}"
            return f"the gang waits for {wanted}, which it takes together: free in the cluster is {free}."
        return (
            f"{name_of(slot)} waits for {in_words(self._demand)}: free in the cluster is {free}."
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
