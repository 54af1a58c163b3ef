"""How neighbours on the ring of a generation connect, in shared memory on one host and over TCP elsewhere."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from quorate.collectives.endpoint import Endpoint
from quorate.collectives.ring import Blame, Ring, unchanged
from quorate.core.generation import Member, names_of
from quorate.wire.link import Deadline
from quorate.wire.shared_link import SharedLink, accept_all_shared, connect_shared
from quorate.wire.stream import Watch
from quorate.wire.tcp import TcpLink
from quorate.wire.tcp import connect as connect_tcp

log = logging.getLogger(__name__)

GLANCE = 0.05
"""Seconds until one of two waits notices that the other has failed."""

Neighbour = SharedLink | TcpLink
"""In shared memory to a worker of the same host, over TCP to one elsewhere."""
Links = dict[int, Neighbour]


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
    position, size = endpoint.position, len(endpoint.generation.members)
    previous, following = (position - 1) % size, (position + 1) % size
    connected, accepted = connect_members(endpoint, [following], [previous])
    log.info("on the ring: %s before, %s behind", _described(accepted[previous]), _described(connected[following]))
    return accepted[previous], connected[following]


def connect_members(endpoint: Endpoint, to: Sequence[int], of: Sequence[int]) -> tuple[Links, Links]:
    """Links to the members at some positions, and those that others make, by position; all of them at once.

    Were everyone to connect before accepting, all would wait for themselves. So everybody waits only for whom it lacks,
    and names the right one when the time is over. The first failure ends it all.
    """
    members, connected, accepted = endpoint.generation.members, dict[int, Neighbour](), dict[int, Neighbour]()
    errors: list[BaseException] = []

    def deadline() -> float:
        return 0 if errors else min(endpoint.deadline(), GLANCE)

    def connect(position: int) -> None:
        connected[position] = _connected(endpoint, members[position], deadline)

    def accept(positions: Mapping[int, int], is_local: bool) -> None:
        for worker, link in _accepted(endpoint, [members[at] for at in positions.values()], deadline, is_local):
            accepted[positions[worker]] = link

    works: list[Callable[[], None]] = [partial(connect, position) for position in to]
    for is_local in (True, False):
        awaited = {members[at].worker: at for at in of if endpoint.shares_a_host_with(members[at]) is is_local}
        works += [partial(accept, awaited, is_local)] if awaited else []
    with ThreadPoolExecutor(len(works), thread_name_prefix="quorate-connect") as threads:
        for work in works:
            # At once: the others are not to go on waiting.
            threads.submit(work).add_done_callback(lambda done: errors.extend(filter(None, [done.exception()])))
    if errors:
        for link in (*connected.values(), *accepted.values()):
            link.close()
        raise errors[0]
    return dict(sorted(connected.items())), dict(sorted(accepted.items()))


def _connected(endpoint: Endpoint, following: Member, deadline: Deadline) -> Neighbour:
    if endpoint.shares_a_host_with(following):
        return connect_shared(following.local_address, endpoint.credentials, following.worker, deadline)
    return connect_tcp(following.address, endpoint.credentials, following.worker, deadline, endpoint.silence)


def _accepted(
    endpoint: Endpoint, awaited: Sequence[Member], deadline: Deadline, is_local: bool
) -> Iterator[tuple[int, Neighbour]]:
    listeners, credentials = endpoint.listeners, endpoint.credentials
    workers = {member.worker for member in awaited}
    if is_local:
        assert listeners.local is not None, "whoever has an address of its host listens there"
        yield from accept_all_shared(listeners.local, credentials, workers, deadline)
        return
    yield from listeners.network.accept_all(credentials, workers, deadline, endpoint.silence)


def _described(link: Neighbour) -> str:
    how = "in shared memory" if isinstance(link, SharedLink) else "over TLS" if link.is_encrypted else "over TCP"
    return f"{link.peer} {how}"
