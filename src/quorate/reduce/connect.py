"""How the workers of a generation connect: in shared memory where they run on one host, on a ring elsewhere."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from quorate.core.generation import Generation, Member, name_of, names_of
from quorate.lanes.buckets import Bucket
from quorate.reduce.memory import Allocate, GradientMemory, SharedMemory, layout_of, zeros
from quorate.reduce.reduction import Reduction
from quorate.reduce.ring import Blame, Ring, unchanged
from quorate.reduce.shared_memory import SharedMemoryReduction
from quorate.wire.handshake import Credentials
from quorate.wire.link import Deadline
from quorate.wire.local import LocalListener, connect_local, pass_descriptors, receive_descriptors, share_a_host
from quorate.wire.shared_link import SharedLink, accept_shared, connect_shared
from quorate.wire.shared_memory import Doorbell, Segment
from quorate.wire.stream import Watch
from quorate.wire.tcp import Knock, Listener, TcpLink
from quorate.wire.tcp import connect as connect_tcp

log = logging.getLogger(__name__)

GLANCE = 0.05
"""Seconds until one of two waits notices that the other has failed."""

STAGING = 2 * 2**20
"""Bytes that the memory of the total has at least: a state passes through it too, and each piece costs a barrier."""

_PATIENCE = 0.25
"""The part of the time of silence for which a worker that does not come is just late: mostly it is there by then."""

Neighbour = SharedLink | TcpLink
"""In shared memory to a worker of the same host, over TCP to one elsewhere."""


@dataclass(frozen=True)
class Listeners:
    """Where a worker waits for the others: over the network, and on its own host unless that is switched off."""

    network: Listener
    local: LocalListener | None

    @classmethod
    def bind(cls, host: str, *, shares_memory: bool, engine_host: str = "") -> "Listeners":
        """`engine_host`: the name of this host, where the engine tells hosts apart that one machine has."""
        return cls(Listener.bind(host), LocalListener(engine_host) if shares_memory else None)

    @property
    def local_address(self) -> str:
        """Empty where the worker cannot be met on its host."""
        return "" if self.local is None else self.local.address

    def close(self) -> None:
        self.network.close()
        if self.local is not None:
            self.local.close()


@dataclass(frozen=True)
class Endpoint:
    """A worker's end of the connections of a generation: who it is, where it listens, how long it waits for the others.

    `deadline` is for connecting, `lease` for every exchange afterwards. `silence`: the seconds after which a
    neighbour elsewhere whose host does not answer is lost, before either is over.
    """

    generation: Generation
    credentials: Credentials
    listeners: Listeners
    deadline: Deadline
    lease: Deadline
    silence: float | None = None

    @property
    def position(self) -> int:
        return self.generation.position(self.credentials.worker)

    @property
    def hosting(self) -> list[range]:
        return [member.lanes for member in self.generation.members]

    def shares_a_host_with(self, other: Member) -> bool:
        """Both ends ask this of the same two addresses, so they agree."""
        return share_a_host([self.generation.members[self.position].local_address, other.local_address])


def connect(
    endpoint: Endpoint, plan: Sequence[Bucket], *, trusts_versions: bool = False, allocate: Allocate = zeros
) -> tuple[Reduction, GradientMemory]:
    """Sums over all lanes of the generation, and the memory that they are summed in.

    `trusts_versions`: whoever writes to the total between exchanges is known to do so through torch, which counts it.
    `allocate` gives the memory that is not shared.
    """
    members = endpoint.generation.members
    if is_on_one_host(endpoint):
        if plan:
            log.info("gradients are summed in shared memory: all %d workers run on this host", len(members))
        memory, doorbells = _share_memory(endpoint, plan)
        reduction = SharedMemoryReduction(
            endpoint.generation,
            endpoint.credentials.worker,
            doorbells,
            memory,
            endpoint.lease,
            trusts_versions=trusts_versions,
        )
        return reduction, memory
    if len(members) > 1:
        log.info("gradients go round a ring: %s", _why_not_shared(endpoint))
    previous, following = connect_neighbours(endpoint)
    lease, blame = watch(endpoint, [previous, following])
    ring = Ring(endpoint.generation, endpoint.credentials.worker, previous, following, lease, blame)
    return ring, GradientMemory.of_process(plan, endpoint.hosting[endpoint.position], allocate)


def is_on_one_host(endpoint: Endpoint) -> bool:
    """Whether the generation has several members, and all of them can read the memory of one host."""
    members = endpoint.generation.members
    return len(members) > 1 and share_a_host([member.local_address for member in members])


def watch(endpoint: Endpoint, neighbours: Sequence[Neighbour | None]) -> tuple[Deadline, Blame]:
    """The lease, which also ends for a neighbour elsewhere that is silent; and who is to blame when a link ends."""
    elsewhere = [link for link in neighbours if isinstance(link, TcpLink)]
    if endpoint.silence is None or not elsewhere:
        return endpoint.lease, unchanged
    watch = Watch(endpoint.lease, elsewhere, endpoint.silence)
    return watch, watch.blame


def _why_not_shared(endpoint: Endpoint) -> str:
    silent = [member.worker for member in endpoint.generation.members if not member.local_address]
    if silent:
        why = "links: tcp, encrypt: true, or a kernel that does not tell its boot"
        return f"{names_of(silent)} offer no shared memory ({why})"
    return "the workers run on different hosts"


def _share_memory(endpoint: Endpoint, plan: Sequence[Bucket]) -> tuple[SharedMemory, dict[int, Doorbell]]:
    position, hosting, size = endpoint.position, endpoint.hosting, layout_of(plan).size
    total_size = max(size, STAGING)
    with contextlib.ExitStack() as descriptors, contextlib.ExitStack() as on_failure:
        lanes = {position: Segment.create(_size_of(hosting[position], size))}
        descriptors.callback(lanes[position].close)
        total = None
        if position == 0:
            total = Segment.create(total_size)
            descriptors.callback(total.close)
        connections: dict[int, socket.socket] = {}
        for peer, sock in _connections(endpoint):
            connections[peer] = sock
            on_failure.callback(sock.close)
        names = {peer: f"{name_of(endpoint.generation.members[peer].worker)} (this host)" for peer in connections}
        ours = [segment.descriptor for segment in (lanes[position], total) if segment is not None]
        for peer, sock in connections.items():
            pass_descriptors(sock, ours, names[peer])
        for peer, sock in connections.items():
            given = receive_descriptors(sock, 2 if peer == 0 else 1, names[peer], endpoint.deadline)
            lanes[peer] = Segment.adopt(given[0], _size_of(hosting[peer], size))
            descriptors.callback(lanes[peer].close)
            if peer == 0:
                total = Segment.adopt(given[1], total_size)
                descriptors.callback(total.close)
        assert total is not None, "position 0 makes it, and passes it to all others"
        memory = SharedMemory(plan, hosting, position, [lanes[place] for place in range(len(hosting))], total)
        on_failure.pop_all()
    generation = endpoint.generation.id
    doorbells = {peer: Doorbell(sock, names[peer], generation) for peer, sock in sorted(connections.items())}
    return memory, doorbells


def _size_of(hosted: range, lane_size: int) -> int:
    """Bytes for these lanes; a segment has some, even if it is a server's, which hosts none."""
    return max(1, len(hosted) * lane_size)


def _connections(endpoint: Endpoint) -> Iterator[tuple[int, socket.socket]]:
    """To everybody, by ring position: a worker connects to those before it, and waits for those behind it."""
    members, position, credentials = endpoint.generation.members, endpoint.position, endpoint.credentials
    for peer, member in enumerate(members[:position]):
        yield peer, connect_local(member.local_address, credentials, member.worker, endpoint.deadline)
    awaited = {member.worker: peer for peer, member in enumerate(members) if peer > position}
    assert endpoint.listeners.local is not None, "whoever has an address of its host listens there"
    for worker, sock in endpoint.listeners.local.accept(credentials, awaited.keys(), endpoint.deadline):
        yield awaited[worker], sock


# --- on a ring


def connect_neighbours(endpoint: Endpoint) -> tuple[Neighbour | None, Neighbour | None]:
    """Links to the previous and to the next worker on the ring; a worker that is alone has neither."""
    members, position, deadline = endpoint.generation.members, endpoint.position, endpoint.deadline
    if len(members) == 1:
        return None, None
    previous, following = members[position - 1], members[(position + 1) % len(members)]
    given_up = threading.Event()

    def connect_deadline() -> float:
        return 0 if given_up.is_set() else min(deadline(), GLANCE)

    # Both at once: were everyone to connect before accepting, the whole ring would wait for itself.
    with ThreadPoolExecutor(1, thread_name_prefix="quorate-ring-connect") as thread:
        connecting = thread.submit(connect_to, endpoint, following, connect_deadline)

        def accept_deadline() -> float:
            late.check()
            return _unless_failed(connecting, deadline)

        try:
            with contextlib.closing(Awaited(endpoint, previous)) as late:
                accepted = _accept(endpoint, previous, accept_deadline)
        except BaseException:
            given_up.set()
            _close_if_open(connecting)
            raise
        try:
            connected = connecting.result()
        except BaseException:
            accepted.close()
            raise
    log.info("on the ring: %s before, %s behind", _described(accepted), _described(connected))
    return accepted, connected


class Awaited:
    """Whether a worker that has not connected yet could: it may be late, or on its way in vain."""

    def __init__(self, endpoint: Endpoint, awaited: Member) -> None:
        self._awaited = awaited
        self._silence = None if endpoint.shares_a_host_with(awaited) else endpoint.silence
        self._began = time.monotonic()
        self._knock: Knock | None = None

    def check(self) -> None:
        """Raise PeerLost if its host has not answered for too long."""
        if self._silence is None:
            return
        patience = self._silence * _PATIENCE
        if self._knock is None and time.monotonic() - self._began >= patience:
            self._knock = Knock(self._awaited.address, f"{name_of(self._awaited.worker)} ({self._awaited.address})")
        if self._knock is not None:
            self._knock.check(self._silence - patience)

    def close(self) -> None:
        if self._knock is not None:
            self._knock.close()


def connect_to(endpoint: Endpoint, following: Member, deadline: Deadline) -> Neighbour:
    """A link to a member that accepts one."""
    if endpoint.shares_a_host_with(following):
        return connect_shared(following.local_address, endpoint.credentials, following.worker, deadline)
    return connect_tcp(following.address, endpoint.credentials, following.worker, deadline, endpoint.silence)


def _accept(endpoint: Endpoint, previous: Member, deadline: Deadline) -> Neighbour:
    listeners, credentials = endpoint.listeners, endpoint.credentials
    if endpoint.shares_a_host_with(previous):
        assert listeners.local is not None, "whoever has an address of its host listens there"
        return accept_shared(listeners.local, credentials, previous.worker, deadline)
    return listeners.network.accept(credentials, previous.worker, deadline, endpoint.silence)


def _described(link: Neighbour) -> str:
    how = "in shared memory" if isinstance(link, SharedLink) else "over TLS" if link.is_encrypted else "over TCP"
    return f"{link.peer} {how}"


def _unless_failed(connecting: Future[Neighbour], deadline: Deadline) -> float:
    """The deadline of accepting, which has no point once connecting has failed."""
    if connecting.done() and (error := connecting.exception()) is not None:
        raise error
    return min(deadline(), GLANCE)


def _close_if_open(connecting: Future[Neighbour]) -> None:
    if connecting.exception() is None:
        connecting.result().close()
