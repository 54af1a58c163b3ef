"""How a worker finds its neighbours on the ring."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

from quorate.core.generation import Generation
from quorate.wire.handshake import Credentials
from quorate.wire.link import Deadline
from quorate.wire.tcp import Listener, TcpLink, connect

GLANCE = 0.05
"""Seconds until one of two waits notices that the other has failed."""


def meet_neighbours(
    listener: Listener, generation: Generation, credentials: Credentials, deadline: Deadline
) -> tuple[TcpLink | None, TcpLink | None]:
    """Links to the previous and to the next worker; a worker that is alone has neither."""
    members = generation.members
    if len(members) == 1:
        return None, None
    position = generation.position(credentials.worker)
    previous, following = members[position - 1], members[(position + 1) % len(members)]
    given_up = threading.Event()

    def connect_deadline() -> float:
        return 0 if given_up.is_set() else min(deadline(), GLANCE)

    # Both at once: were everyone to connect before accepting, the whole ring would wait for itself.
    with ThreadPoolExecutor(1, thread_name_prefix="quorate-ring-connect") as thread:
        connecting = thread.submit(connect, following.address, credentials, following.worker, connect_deadline)
        try:
            accepted = listener.accept(credentials, previous.worker, lambda: _unless_failed(connecting, deadline))
        except BaseException:
            given_up.set()
            _close_if_open(connecting)
            raise
        try:
            return accepted, connecting.result()
        except BaseException:
            accepted.close()
            raise


def _unless_failed(connecting: Future[TcpLink], deadline: Deadline) -> float:
    """The deadline of accepting, which has no point once connecting has failed."""
    if connecting.done() and (error := connecting.exception()) is not None:
        raise error
    return min(deadline(), GLANCE)


def _close_if_open(connecting: Future[TcpLink]) -> None:
    if connecting.exception() is None:
        connecting.result().close()
