"""How a worker finds its neighbours on the ring."""

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from quorate.core.generation import Generation, Member
from quorate.wire.handshake import Credentials
from quorate.wire.link import Deadline
from quorate.wire.local import LocalListener, share_a_host
from quorate.wire.shared_link import SharedLink, accept_shared, connect_shared
from quorate.wire.tcp import Listener, TcpLink, connect

log = logging.getLogger(__name__)

GLANCE = 0.05
"""Seconds until one of two waits notices that the other has failed."""

Neighbour = SharedLink | TcpLink
"""In shared memory to a worker of the same host, over TCP to one elsewhere."""


def meet_neighbours(
    network: Listener,
    local: LocalListener | None,
    generation: Generation,
    credentials: Credentials,
    deadline: Deadline,
) -> tuple[Neighbour | None, Neighbour | None]:
    """Links to the previous and to the next worker; a worker that is alone has neither."""
    members = generation.members
    if len(members) == 1:
        return None, None
    position = generation.position(credentials.worker)
    own, previous, following = members[position], members[position - 1], members[(position + 1) % len(members)]
    given_up = threading.Event()

    def connect_deadline() -> float:
        return 0 if given_up.is_set() else min(deadline(), GLANCE)

    # Both at once: were everyone to connect before accepting, the whole ring would wait for itself.
    with ThreadPoolExecutor(1, thread_name_prefix="quorate-ring-connect") as thread:
        connecting = thread.submit(_connect, own, following, credentials, connect_deadline)

        def accept_deadline() -> float:
            return _unless_failed(connecting, deadline)

        try:
            accepted = _accept(own, previous, network, local, credentials, accept_deadline)
        except BaseException:
            given_up.set()
            _close_if_open(connecting)
            raise
        try:
            connected = connecting.result()
        except BaseException:
            accepted.close()
            raise
    log.info("on the ring: %s before, %s behind", _told(accepted), _told(connected))
    return accepted, connected


def _connect(own: Member, following: Member, credentials: Credentials, deadline: Deadline) -> Neighbour:
    if _share_memory(own, following):
        return connect_shared(following.local_address, credentials, following.worker, deadline)
    return connect(following.address, credentials, following.worker, deadline)


def _accept(
    own: Member,
    previous: Member,
    network: Listener,
    local: LocalListener | None,
    credentials: Credentials,
    deadline: Deadline,
) -> Neighbour:
    if _share_memory(own, previous):
        assert local is not None, "whoever has an address of its host listens there"
        return accept_shared(local, credentials, previous.worker, deadline)
    return network.accept(credentials, previous.worker, deadline)


def _share_memory(one: Member, other: Member) -> bool:
    """Both ends ask this of the same two addresses, so they agree."""
    return share_a_host([one.local_address, other.local_address])


def _told(link: Neighbour) -> str:
    return f"{link.peer} {'in shared memory' if isinstance(link, SharedLink) else 'over TCP'}"


def _unless_failed(connecting: Future[Neighbour], deadline: Deadline) -> float:
    """The deadline of accepting, which has no point once connecting has failed."""
    if connecting.done() and (error := connecting.exception()) is not None:
        raise error
    return min(deadline(), GLANCE)


def _close_if_open(connecting: Future[Neighbour]) -> None:
    if connecting.exception() is None:
        connecting.result().close()
