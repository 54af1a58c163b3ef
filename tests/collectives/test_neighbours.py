import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from quorate.collectives.endpoint import Endpoint, Listeners
from quorate.collectives.neighbours import connect_neighbours
from quorate.collectives.ring import Ring
from quorate.core.errors import PeerLost
from quorate.core.generation import Generation, Member
from quorate.lanes.chunks import host_lanes
from quorate.wire import tcp
from quorate.wire.tcp import Listener
from wire.pairs import GENERATION, credentials, listening, on_host, open_descriptors, within


@pytest.fixture(autouse=True)
def no_thread_is_left_behind() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def generation(addresses: list[str], local_addresses: list[str] | None = None) -> Generation:
    workers = len(addresses)
    places = zip(addresses, host_lanes(workers, workers), local_addresses or [""] * workers, strict=True)
    return Generation(GENERATION, tuple(Member(worker, *place) for worker, place in enumerate(places)))


def endpoint(ours: Listener, members: Generation, worker: int = 0, *, silence: float) -> Endpoint:
    """Of a worker that is met over the network alone."""
    return Endpoint(members, credentials(worker), Listeners(ours, None), within(100), within(100), silence)


S, T = "SharedLink", "TcpLink"


@pytest.mark.parametrize(
    ("hosts", "kinds"),
    [
        ("--", [T, T]),
        ("---", [T, T, T]),
        ("AB", [T, T]),
        ("A-", [T, T]),
        ("AA", [S, S]),
        ("AAB", [S, T, T]),
        ("ABA", [T, T, S]),
        ("AA-", [S, T, T]),
        ("AABB", [S, T, S, T]),
        ("ABAB", [T, T, T, T]),
        ("AAABB", [S, S, T, S, T]),
    ],
)
def test_a_ring_forms_though_everyone_begins_at_once_and_shares_memory_where_neighbours_share_a_host(
    hosts: str, kinds: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """`kinds`: of the links from each worker to the next. A worker on host "-" does not say where it is."""
    caplog.set_level(logging.INFO, "quorate.collectives.neighbours")
    workers = len(hosts)
    before = open_descriptors()
    with ExitStack() as stack:
        listeners = [Listeners.bind("127.0.0.1", shares_memory=host != "-") for host in hosts]
        for each in listeners:
            stack.callback(each.close)
        addresses = [each.network.address for each in listeners]
        members = generation(addresses, [on_host(hosts[i], each.local_address) for i, each in enumerate(listeners)])
        threads = stack.enter_context(ThreadPoolExecutor(workers))

        def work(worker: int) -> tuple[list[str], tuple[bytes, ...]]:
            ours = listeners[worker]
            links = connect_neighbours(Endpoint(members, credentials(worker), ours, within(100), within(100)))
            ring = Ring(members, worker, *links, within(100))
            try:
                return [type(link).__name__ for link in links], ring.gather(0, 0, bytes([worker]))
            finally:
                ring.close()

        told = list(threads.map(work, range(workers)))
    assert [gathered for _, gathered in told] == [tuple(bytes([worker]) for worker in range(workers))] * workers
    assert [links for links, _ in told] == [[kinds[i - 1], kinds[i]] for i in range(workers)]
    logged = " ".join(record.getMessage() for record in caplog.records)
    assert logged.count("(this host) in shared memory") == 2 * kinds.count(S)
    assert logged.count("over TCP") == 2 * kinds.count(T)
    assert open_descriptors() <= before


@contextmanager
def listening_on(hosts: str) -> Iterator[tuple[list[Listeners], Generation]]:
    """Workers that all listen; one on host "-" does not say where it is."""
    before = open_descriptors()
    listeners = [Listeners.bind("127.0.0.1", shares_memory=host != "-") for host in hosts]
    local_addresses = [on_host(host, each.local_address) for host, each in zip(hosts, listeners, strict=True)]
    yield listeners, generation([each.network.address for each in listeners], local_addresses)
    for each in listeners:
        each.close()
    assert open_descriptors() <= before


@pytest.mark.parametrize("hosts", ["---", "AAB", "ABA"])
def test_a_next_worker_that_is_dead_ends_the_wait_for_the_previous_one(hosts: str) -> None:
    with listening_on(hosts) as (listeners, members):
        listeners[1].close()
        began = time.monotonic()
        with pytest.raises(PeerLost, match=r"worker 1 .* cannot be reached"):
            connect_neighbours(Endpoint(members, credentials(0), listeners[0], within(100), within(100)))
        assert time.monotonic() - began < 50


@pytest.mark.parametrize("hosts", ["---", "AAB", "ABA"])
def test_neighbours_that_never_come_are_lost_when_the_deadline_is_over(hosts: str) -> None:
    with listening_on(hosts) as (listeners, members), pytest.raises(PeerLost, match=r"worker [12].* is gone"):
        connect_neighbours(Endpoint(members, credentials(0), listeners[0], within(0.1), within(100)))


def test_a_previous_worker_that_is_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "SHORTEST_CALL", 0.1)
    with listening() as ours, listening() as theirs, ThreadPoolExecutor(1) as threads:
        members = generation([ours.address, theirs.address])
        connecting = threads.submit(connect_neighbours, endpoint(ours, members, silence=0.1))
        time.sleep(0.5)  # for that long
        links = connect_neighbours(endpoint(theirs, members, 1, silence=0.1))
        for link in (*links, *connecting.result()):
            assert link is not None
            link.close()
