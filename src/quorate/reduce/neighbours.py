"""How neighbours on the ring of a generation connect, in shared memory on one host and over TCP elsewhere."""

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from quorate.core.generation import Member, name_of, names_of
from quorate.reduce.endpoint import Endpoint
from quorate.reduce.ring import Blame, Ring, unchanged
from quorate.wire.link import Deadline
from quorate.wire.shared_link import SharedLink, accept_shared, connect_shared
from quorate.wire.stream import Watch
from quorate.wire.tcp import Knock, TcpLink
from quorate.wire.tcp import connect as connect_tcp

log = logging.getLogger(__name__)

GLANCE = 0.05
"""Seconds until one of two waits notices that the other has failed."""

_PATIENCE = 0.25
"""The part of the time of silence for which a worker that does not come is just late: mostly it is there by then."""

Neighbour = SharedLink | TcpLink
"""In shared memory to a worker of the same host, over TCP to one elsewhere."""


def connect_ring(endpoint: Endpoint) -> Ring:
    """A worker's place on the ring, linked to both of its neighbours."""
    log.info("gradients go round a ring: %s", _why_not_shared(endpoint))
    previous, following = connect_neighbours(endpoint)
    lease, blame = watch(endpoint, [previous, following])
    return Ring(endpoint.generation, endpoint.credentials.worker, previous, following, lease, blame)


def watch(endpoint: Endpoint, neighbours: Sequence[Neighbour]) -> tuple[Deadline, Blame]:
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


def connect_neighbours(endpoint: Endpoint) -> tuple[Neighbour, Neighbour]:
    """Links to the previous and to the next worker on the ring."""
    members, position, deadline = endpoint.generation.members, endpoint.position, endpoint.deadline
    previous, following = members[position - 1], members[(position + 1) % len(members)]
    given_up = threading.Event()

    def connect_deadline() -> float:
        return 0 if given_up.is_set() else min(deadline(), GLANCE)

    # Both at once: were everyone to connect before accepting, the whole ring would wait for itself.
    with ThreadPoolExecutor(1, thread_name_prefix="quorate-ring-connect") as thread:
        connecting = thread.submit(connect_to, endpoint, following, connect_deadline)

        def accept_deadline() -> float:
            late.check()
            # To accept has no point once connecting has failed.
            if connecting.done() and (error := connecting.exception()) is not None:
                raise error
            return min(deadline(), GLANCE)

        try:
            with contextlib.closing(Awaited(endpoint, previous)) as late:
                accepted = _accept(endpoint, previous, accept_deadline)
        except BaseException:
            given_up.set()
            if connecting.exception() is None:
                connecting.result().close()
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
