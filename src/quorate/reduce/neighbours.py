"""How a worker connects to its neighbours on the ring."""

import contextlib
import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

from quorate.core.generation import Generation, Member
from quorate.wire.handshake import Credentials
from quorate.wire.link import Deadline
from quorate.wire.local import LocalListener, share_a_host
from quorate.wire.shared_link import SharedLink, accept_shared, connect_shared
from quorate.wire.tcp import Knock, Listener, TcpLink, connect

log = logging.getLogger(__name__)

GLANCE = 0.05
"""Seconds until one of two waits notices that the other has failed."""

_PATIENCE = 0.25
"""The part of the time of silence for which a worker that does not come is just late: mostly it is there by then."""

Neighbour = SharedLink | TcpLink
"""In shared memory to a worker of the same host, over TCP to one elsewhere."""


def connect_neighbours(
    network: Listener,
    local: LocalListener | None,
    generation: Generation,
    credentials: Credentials,
    deadline: Deadline,
    silence: float | None = None,
) -> tuple[Neighbour | None, Neighbour | None]:
    """Links to the previous and to the next worker; a worker that is alone has neither.

    `silence`: the seconds after which a neighbour elsewhere whose host does not answer is lost.
    """
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
        connecting = thread.submit(_connect, own, following, credentials, connect_deadline, silence)

        def accept_deadline() -> float:
            late.check()
            return _unless_failed(connecting, deadline)

        try:
            with contextlib.closing(_Awaited(own, previous, silence)) as late:
                accepted = _accept(own, previous, network, local, credentials, accept_deadline, silence)
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


class _Awaited:
    """Whether a worker that has not connected yet could: it may be late, or on its way in vain."""

    def __init__(self, own: Member, awaited: Member, silence: float | None) -> None:
        self._awaited = awaited
        self._silence = None if _share_memory(own, awaited) else silence
        self._began = time.monotonic()
        self._knock: Knock | None = None

    def check(self) -> None:
        """Raise PeerLost if its host has not answered for too long."""
        if self._silence is None:
            return
        patience = self._silence * _PATIENCE
        if self._knock is None and time.monotonic() - self._began >= patience:
            self._knock = Knock(self._awaited.address, f"worker {self._awaited.worker} ({self._awaited.address})")
        if self._knock is not None:
            self._knock.check(self._silence - patience)

    def close(self) -> None:
        """Ask no longer."""
        if self._knock is not None:
            self._knock.close()


def _connect(
    own: Member, following: Member, credentials: Credentials, deadline: Deadline, silence: float | None
) -> Neighbour:
    if _share_memory(own, following):
        return connect_shared(following.local_address, credentials, following.worker, deadline)
    return connect(following.address, credentials, following.worker, deadline, silence)


def _accept(
    own: Member,
    previous: Member,
    network: Listener,
    local: LocalListener | None,
    credentials: Credentials,
    deadline: Deadline,
    silence: float | None,
) -> Neighbour:
    if _share_memory(own, previous):
        assert local is not None, "whoever has an address of its host listens there"
        return accept_shared(local, credentials, previous.worker, deadline)
    return network.accept(credentials, previous.worker, deadline, silence)


def _share_memory(one: Member, other: Member) -> bool:
    """Both ends ask this of the same two addresses, so they agree."""
    return share_a_host([one.local_address, other.local_address])


def _described(link: Neighbour) -> str:
    return f"{link.peer} {'in shared memory' if isinstance(link, SharedLink) else 'over TCP'}"


def _unless_failed(connecting: Future[Neighbour], deadline: Deadline) -> float:
    """The deadline of accepting, which has no point once connecting has failed."""
    if connecting.done() and (error := connecting.exception()) is not None:
        raise error
    return min(deadline(), GLANCE)


def _close_if_open(connecting: Future[Neighbour]) -> None:
    if connecting.exception() is None:
        connecting.result().close()
