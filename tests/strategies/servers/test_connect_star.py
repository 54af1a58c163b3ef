import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from collectives.reference import bits
from quorate.collectives import neighbours
from quorate.collectives.endpoint import Endpoint, Listeners
from quorate.collectives.neighbours import Neighbour, connect_neighbours, watch
from quorate.collectives.ring import Ring
from quorate.core.errors import PeerLost
from quorate.core.generation import Generation, Member, Role
from quorate.lanes.chunks import host_lanes
from quorate.strategies.servers.exchange import Star
from quorate.strategies.servers.links import Spokes, connect_star, peers_of
from quorate.wire.link import Tag
from strategies.servers.stars import F32_TENSORS, case
from wire.pairs import GENERATION, credentials, on_host, open_descriptors, within

T = TypeVar("T")
SHARED, TCP = "SharedLink", "TcpLink"


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    yield
    assert set(threading.enumerate()) <= threads
    assert open_descriptors() <= descriptors


@contextmanager
def members(workers: str, servers: str) -> Iterator[tuple[list[Listeners], Generation]]:
    """By host; one on host "-" does not say where it is."""
    hosts = workers + servers
    listeners = [Listeners.bind("127.0.0.1", shares_memory=host != "-") for host in hosts]
    lanes = [*host_lanes(len(workers), len(workers)), *[range(0)] * len(servers)]
    made = [
        Member(
            worker,
            listeners[worker].network.address,
            lanes[worker],
            on_host(host, listeners[worker].local_address),
            role=Role.WORKER if worker < len(workers) else Role.SERVER,
        )
        for worker, host in enumerate(hosts)
    ]
    try:
        yield listeners, Generation(GENERATION, tuple(made))
    finally:
        for each in listeners:
            each.close()


def everywhere(
    listeners: list[Listeners],
    generation: Generation,
    work: Callable[[Endpoint, Ring, dict[int, Neighbour]], T],
    seconds: float = 100,
) -> list[T]:
    def connect(worker: int) -> T:
        endpoint = Endpoint(generation, credentials(worker), listeners[worker], within(seconds), within(100))
        ring = Ring(generation, worker, *connect_neighbours(endpoint), within(100))
        links: dict[int, Neighbour] = {}
        try:
            links = connect_star(endpoint, ring)
            return work(endpoint, ring, links)
        finally:
            for link in links.values():
                link.close()
            ring.close()

    with ThreadPoolExecutor(len(listeners)) as threads:
        return list(threads.map(connect, range(len(listeners))))


@pytest.mark.parametrize(
    ("workers", "servers"),
    [("A", "A"), ("-", "-"), ("A", "B"), ("AA", "A"), ("AB", "AB"), ("AB", "BA"), ("A-B", "BA"), ("AAAA", "BBA")],
)
def test_servers_are_linked_to_everybody_though_all_begin_at_once_and_the_ring_is_another_connection(
    workers: str, servers: str
) -> None:
    hosts = workers + servers

    def speak(endpoint: Endpoint, ring: Ring, links: dict[int, Neighbour]) -> tuple[dict[int, str], list[bytes]]:
        tag = Tag(GENERATION, 1, 50, 0)
        name = bytes([endpoint.position])
        for link in links.values():
            link.send(tag, name, within(100))
        told = [bytes(link.receive(tag, within(100))) for link in links.values()]
        assert ring.gather(1, 0, name) == tuple(bytes([peer]) for peer in range(len(hosts)))
        return {peer: type(link).__name__ for peer, link in links.items()}, told

    with members(workers, servers) as (listeners, generation):
        for position, (kinds, told) in enumerate(everywhere(listeners, generation, speak)):
            expected = [p for p in range(len(hosts)) if p != position and max(p, position) >= len(workers)]
            assert list(kinds) == list(peers_of(generation, position)) == expected
            assert told == [bytes([peer]) for peer in expected]
            for peer, kind in kinds.items():
                assert kind == (SHARED if hosts[peer] == hosts[position] != "-" else TCP)


def test_a_step_over_links_of_both_kinds() -> None:
    given = case(F32_TENSORS, 2, 2, 2, replicas=2)
    expected = given.sums()

    def step(endpoint: Endpoint, ring: Ring, links: dict[int, Neighbour]) -> None:
        position = endpoint.position
        deadline, blame = watch(endpoint, [*links.values()])
        lanes = {lane: given.values[lane] for lane in endpoint.hosting[position]}
        spokes = Spokes(endpoint.generation, position, links, deadline, blame)
        star = Star(spokes, given.plan, given.holders, lanes)
        values = given.empty(range(len(given.holders)))
        if position in given.workers:
            star.push(1)
            star.pull(1, values)
        else:
            star.receive(1)
            values = {block: values[block] for block in given.held(position)}
            star.add_up(1, values)
            star.publish(1, values)
        for block, value in values.items():
            assert bits(value) == bits(expected[block])
        ring.gather(1, 0, b"")  # nobody closes before all have what they wait for

    with members("AB", "BA") as (listeners, generation):
        everywhere(listeners, generation, step)


@pytest.mark.parametrize("workers_and_servers", ["A A", "- -", "AB AB"])
def test_a_member_that_gives_up_before_the_star_ends_the_wait_of_those_who_need_it(
    workers_and_servers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its listener is open, so they only learn of it by the deadline or by the ring."""
    workers, servers = workers_and_servers.split()
    linked: list[int] = []
    connected, accepted = neighbours._connected, neighbours._accepted

    def count_connected(endpoint: Endpoint, following: Member, *rest: Any) -> Neighbour:
        link = connected(endpoint, following, *rest)
        linked.append(following.worker)
        return link

    def count_accepted(*given: Any) -> Iterator[tuple[int, Neighbour]]:
        for worker, link in accepted(*given):
            linked.append(worker)
            yield worker, link

    monkeypatch.setattr(neighbours, "_connected", count_connected)
    monkeypatch.setattr(neighbours, "_accepted", count_accepted)
    with members(workers, servers) as (listeners, generation):
        last = len(listeners) - 1
        others = sum(len(set(peers_of(generation, worker)) - {last}) for worker in range(last))
        others += 2 * len(listeners)  # on the ring
        has_given_up = threading.Event()

        def deadline() -> float:
            """However slow the machine is, the time is not over before nobody is missing but the last."""
            return 0.0 if has_given_up.is_set() and len(linked) == others else 100.0

        def join(worker: int) -> None:
            endpoint = Endpoint(generation, credentials(worker), listeners[worker], deadline, within(100))
            ring = Ring(generation, worker, *connect_neighbours(endpoint), within(100))
            try:
                if worker == last:
                    ring.gather(0, 0, b"star")
                    has_given_up.set()
                else:
                    with pytest.raises(PeerLost, match=f"worker {last}\\b"):
                        connect_star(endpoint, ring)
            finally:
                ring.close()

        began = time.monotonic()
        with ThreadPoolExecutor(len(listeners)) as threads:
            list(threads.map(join, range(len(listeners))))
        assert time.monotonic() - began < 50


def test_a_member_that_dies_before_the_star_is_lost_at_once_to_whoever_connects_to_it() -> None:
    with members("--", "-") as (listeners, generation):

        def join(worker: int) -> str:
            endpoint = Endpoint(generation, credentials(worker), listeners[worker], within(100), within(100))
            ring = Ring(generation, worker, *connect_neighbours(endpoint), within(100))
            try:
                if worker == 0:
                    listeners[0].close()
                    ring.gather(0, 0, b"star")
                    return ""
                if worker == 1:
                    ring.gather(0, 0, b"star")
                    return ""
                with pytest.raises(PeerLost, match=r"worker 0 .*cannot be reached"):
                    connect_star(endpoint, ring)
                return "lost"
            finally:
                ring.close()

        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(join, range(3))) == ["", "", "lost"]


def test_a_ring_that_is_closed_is_no_star() -> None:
    with members("-", "-") as (listeners, generation):

        def join(worker: int) -> None:
            endpoint = Endpoint(generation, credentials(worker), listeners[worker], within(100), within(100))
            ring = Ring(generation, worker, *connect_neighbours(endpoint), within(100))
            if worker == 0:
                ring.close()
                return
            with pytest.raises(PeerLost, match="worker 0"):
                connect_star(endpoint, ring)

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(join, range(2)))
