"""Rings of threads over in-memory links."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar, cast

from memory_link import memory_link_pair
from quorate.collectives.endpoint import Endpoint, Listeners
from quorate.collectives.reduction import Alone
from quorate.collectives.ring import Ring
from quorate.core.generation import Generation, GenerationId, Member, Role, server_id
from quorate.lanes.chunks import host_lanes
from quorate.wire.handshake import Credentials
from quorate.wire.link import Deadline, Link
from wire.pairs import within

T = TypeVar("T")


def generation(lanes: int, workers: int) -> Generation:
    members = [Member(10 + i, f"host:{i}", hosted) for i, hosted in enumerate(host_lanes(lanes, workers))]
    return Generation(GenerationId(1, 1), tuple(members))


@contextmanager
def meeting(
    hosting: Sequence[range],
    *,
    servers: int = 0,
    shares_memory: bool = True,
    deadline: Deadline | None = None,
) -> Iterator[list[Endpoint]]:
    """What workers of one host, of which the first has the number 10, and servers need to connect with each other: they
    listen for as long as this lasts."""
    numbers = [*range(10, 10 + len(hosting)), *map(server_id, range(servers))]
    listeners = [Listeners.bind("127.0.0.1", shares_memory=shares_memory) for _ in numbers]
    members = [
        Member(number, each.network.address, lanes, each.local_address, role=Role.of(number))
        for number, each, lanes in zip(numbers, listeners, [*hosting, *[range(0)] * servers], strict=True)
    ]
    generation = Generation(GenerationId(1, 1), tuple(members))
    ends = (deadline or within(100), within(100))
    try:
        yield [
            Endpoint(generation, Credentials("token", number, generation.id), each, *ends)
            for number, each in zip(numbers, listeners, strict=True)
        ]
    finally:
        for each in listeners:
            each.close()


def memory_links(workers: int) -> list[tuple[Link | None, Link | None]]:
    """For each position its links to the previous and to the next worker."""
    if workers == 1:
        return [(None, None)]
    pairs = [memory_link_pair((f"worker {10 + i}", f"worker {10 + (i + 1) % workers}")) for i in range(workers)]
    return [(pairs[i - 1][1], pairs[i][0]) for i in range(workers)]


def ring_of(
    members: Generation, worker: int, previous: Link | None, following: Link | None, deadline: Deadline
) -> Ring:
    """What a worker that is alone has in the place of a ring does the same."""
    if previous is None or following is None:
        return cast(Ring, Alone())
    return Ring(members, worker, previous, following, deadline)


@contextmanager
def memory_rings(lanes: int, workers: int, deadline: Deadline | None = None) -> Iterator[list[Ring]]:
    members = generation(lanes, workers)
    links = memory_links(workers)
    rings = [
        ring_of(members, member.worker, *neighbours, deadline or within(100))
        for member, neighbours in zip(members.members, links, strict=True)
    ]
    try:
        yield rings
    finally:
        for ring in rings:
            ring.close()


def everywhere(rings: list[Ring], work: Callable[[int, Ring], T]) -> list[T]:
    """What each worker's thread gives, in ring order."""
    with ThreadPoolExecutor(len(rings)) as threads:
        return [future.result() for future in [threads.submit(work, i, ring) for i, ring in enumerate(rings)]]
