import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from quorate.core.errors import PeerLost
from quorate.core.generation import Generation, Member
from quorate.lanes.hosting import host_lanes
from quorate.reduce.neighbours import meet_neighbours
from quorate.reduce.ring import Ring
from quorate.wire.tcp import Listener
from wire.pairs import GENERATION, credentials, listening, within


@pytest.fixture(autouse=True)
def no_thread_is_left_behind() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def generation(addresses: list[str]) -> Generation:
    hosting = host_lanes(len(addresses), len(addresses))
    return Generation(GENERATION, tuple(map(Member, range(len(addresses)), addresses, hosting)))


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_a_ring_forms_though_everyone_begins_at_once(workers: int) -> None:
    with ExitStack() as stack:
        listeners = [stack.enter_context(listening()) for _ in range(workers)]
        members = generation([listener.address for listener in listeners])
        threads = stack.enter_context(ThreadPoolExecutor(workers))

        def work(worker: int) -> tuple[bytes, ...]:
            links = meet_neighbours(listeners[worker], members, credentials(worker), within(5))
            ring = Ring(members, worker, *links, within(5))
            try:
                return ring.gather(0, 0, bytes([worker]))
            finally:
                ring.close()

        expected = tuple(bytes([worker]) for worker in range(workers))
        assert list(threads.map(work, range(workers))) == [expected] * workers


def test_a_next_worker_that_is_dead_ends_the_wait_for_the_previous_one() -> None:
    with listening() as ours, listening() as previous:
        dead = Listener.bind("127.0.0.1")
        dead.close()
        members = generation([ours.address, dead.address, previous.address])
        began = time.monotonic()
        with pytest.raises(PeerLost, match=r"worker 1 .* cannot be reached"):
            meet_neighbours(ours, members, credentials(0), within(30))
        assert time.monotonic() - began < 2


def test_a_previous_worker_that_never_comes_ends_the_wait_for_the_next_one() -> None:
    with listening() as ours, listening() as silent:
        members = generation([ours.address, silent.address, "127.0.0.1:1"])
        with pytest.raises(PeerLost):
            meet_neighbours(ours, members, credentials(0), within(0.2))
