"""How the workers of a generation find each other: in shared memory where they run on one host, on a ring elsewhere."""

import contextlib
import logging
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quorate.core.generation import Generation
from quorate.lanes.buckets import Bucket
from quorate.reduce.memory import Allocate, GradientMemory, PlainMemory, SharedMemory, layout_of, zeros
from quorate.reduce.neighbours import Neighbour, meet_neighbours
from quorate.reduce.pool import Pool
from quorate.reduce.reduction import Reduction
from quorate.reduce.ring import Blame, Ring, as_told
from quorate.wire.doorbell import Doorbell
from quorate.wire.handshake import Credentials
from quorate.wire.link import Deadline
from quorate.wire.local import LocalListener, connect_local, pass_descriptors, receive_descriptors, share_a_host
from quorate.wire.segment import Segment
from quorate.wire.silence import Watch
from quorate.wire.tcp import Listener, TcpLink

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Listeners:
    """Where a worker waits for the others: over the network, and on its own host unless that is switched off."""

    network: Listener
    local: LocalListener | None

    @classmethod
    def bind(cls, host: str, *, shares_memory: bool) -> "Listeners":
        """Listen at free places."""
        return cls(Listener.bind(host), LocalListener() if shares_memory else None)

    @property
    def local_address(self) -> str:
        """Empty where the worker cannot be met on its host."""
        return "" if self.local is None else self.local.address

    def close(self) -> None:
        """Listen no longer."""
        self.network.close()
        if self.local is not None:
            self.local.close()


@dataclass(frozen=True)
class Meeting:
    """What a worker brings along: who it is, where it listens, and how long it waits for the others.

    `deadline` is for meeting them, `lease` for every exchange afterwards. `silence`: the seconds after which a
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
        """This worker's place on the ring."""
        return self.generation.position(self.credentials.worker)

    @property
    def hosting(self) -> list[range]:
        """The lanes of all workers, in ring order."""
        return [member.lanes for member in self.generation.members]


def meet(
    meeting: Meeting, plan: Sequence[Bucket], *, allocate: Allocate = zeros, trusts_versions: bool = False
) -> tuple[Reduction, GradientMemory]:
    """Sums over all lanes of the generation, and the memory that they are summed in.

    `trusts_versions`: whoever writes to the total between exchanges is known to do so through torch, which counts it.
    """
    members = meeting.generation.members
    if len(members) > 1 and share_a_host([member.local_address for member in members]):
        log.info("gradients are summed in shared memory: all %d workers run on this host", len(members))
        memory, doorbells = _share_memory(meeting, plan)
        worker, lease = meeting.credentials.worker, meeting.lease
        return Pool(meeting.generation, worker, doorbells, memory, lease, trusts_versions=trusts_versions), memory
    if len(members) > 1:
        log.info("gradients go round a ring: %s", _why_not_shared(meeting))
    listeners = meeting.listeners
    previous, following = meet_neighbours(
        listeners.network, listeners.local, meeting.generation, meeting.credentials, meeting.deadline, meeting.silence
    )
    lease, blame = _watch(meeting, [previous, following])
    ring = Ring(meeting.generation, meeting.credentials.worker, previous, following, lease, blame)
    return ring, PlainMemory.of(plan, meeting.hosting[meeting.position], allocate)


def _watch(meeting: Meeting, neighbours: Sequence[Neighbour | None]) -> tuple[Deadline, Blame]:
    """The lease, which also ends for a neighbour elsewhere that is silent; and who is to blame when a link ends."""
    elsewhere = [link for link in neighbours if isinstance(link, TcpLink)]
    if meeting.silence is None or not elsewhere:
        return meeting.lease, as_told
    watch = Watch(meeting.lease, elsewhere, meeting.silence)
    return watch, watch.blame


def _why_not_shared(meeting: Meeting) -> str:
    silent = [str(member.worker) for member in meeting.generation.members if not member.local_address]
    if silent:
        return (
            f"workers {', '.join(silent)} offer no shared memory (links: tcp, or a kernel that does not tell its boot)"
        )
    return "the workers run on different hosts"


def _share_memory(meeting: Meeting, plan: Sequence[Bucket]) -> tuple[SharedMemory, dict[int, Doorbell]]:
    position, hosting, size = meeting.position, meeting.hosting, layout_of(plan).size
    with contextlib.ExitStack() as descriptors, contextlib.ExitStack() as on_failure:
        lanes = {position: Segment.create(len(hosting[position]) * size)}
        descriptors.callback(lanes[position].close)
        total = None
        if position == 0:
            total = Segment.create(size)
            descriptors.callback(total.close)
        connections: dict[int, socket.socket] = {}
        for peer, sock in _connections(meeting):
            connections[peer] = sock
            on_failure.callback(sock.close)
        names = {peer: f"worker {meeting.generation.members[peer].worker} (this host)" for peer in connections}
        ours = [segment.descriptor for segment in (lanes[position], total) if segment is not None]
        for peer, sock in connections.items():
            pass_descriptors(sock, ours, names[peer])
        for peer, sock in connections.items():
            given = receive_descriptors(sock, 2 if peer == 0 else 1, names[peer], meeting.deadline)
            lanes[peer] = Segment.adopt(given[0], len(hosting[peer]) * size)
            descriptors.callback(lanes[peer].close)
            if peer == 0:
                total = Segment.adopt(given[1], size)
                descriptors.callback(total.close)
        assert total is not None, "position 0 makes it, and passes it to all others"
        memory = SharedMemory(plan, hosting, position, [lanes[place] for place in range(len(hosting))], total)
        on_failure.pop_all()
    generation = meeting.generation.id
    doorbells = {peer: Doorbell(sock, names[peer], generation) for peer, sock in sorted(connections.items())}
    return memory, doorbells


def _connections(meeting: Meeting) -> Iterator[tuple[int, socket.socket]]:
    """To everybody, by ring position: a worker connects to those before it, and waits for those behind it."""
    members, position, credentials = meeting.generation.members, meeting.position, meeting.credentials
    for peer, member in enumerate(members[:position]):
        yield peer, connect_local(member.local_address, credentials, member.worker, meeting.deadline)
    awaited = {member.worker: peer for peer, member in enumerate(members) if peer > position}
    assert meeting.listeners.local is not None, "whoever has an address of its host listens there"
    for worker, sock in meeting.listeners.local.accept(credentials, awaited.keys(), meeting.deadline):
        yield awaited[worker], sock
