"""The ring between real processes, over TCP and through shared memory."""

import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest
import torch

from collectives.forked import Forked
from collectives.reference import bits, reference_sum, wide_values
from quorate.collectives.endpoint import Endpoint, Listeners
from quorate.collectives.neighbours import connect_neighbours
from quorate.collectives.ring import Ring
from quorate.core.errors import PeerLost
from quorate.core.generation import Generation, Member
from quorate.lanes.chunks import host_lanes
from quorate.wire import shared_link
from wire.pairs import credentials, on_host, open_descriptors, within

LANES = 5
VALUES = wide_values(LANES, 300_001, seed=3)
EXPECTED = bits(reference_sum(VALUES))


class Process(Forked):
    def hear_to_the_end(self) -> list[str]:
        lines = [self.hear()]
        while not lines[-1].startswith("threads"):
            lines.append(self.hear())
        self.process.join(60)
        return lines


def run_worker(position: int, hosts: str, steps: int, launcher: Connection) -> None:
    # More threads than one would be those of the process it was forked from, which are not here.
    torch.set_num_threads(1)
    before = open_descriptors()
    listeners = Listeners.bind("127.0.0.1", shares_memory=True)
    launcher.send(f"{listeners.network.address} {on_host(hosts[position], listeners.local_address)}")
    addresses = [told.split() for told in launcher.recv()]
    hosting = host_lanes(LANES, len(hosts))
    who = credentials(position)
    members = (Member(i, address, hosting[i], local) for i, (address, local) in enumerate(addresses))
    generation = Generation(who.generation, tuple(members))
    links = connect_neighbours(Endpoint(generation, who, listeners, within(100), within(100)))
    launcher.send(" ".join(type(link).__name__ for link in links))
    ring = Ring(generation, position, *links, within(100))
    try:
        for step in range(steps):
            total = torch.full_like(VALUES[0], -1)
            ring.all_reduce(step, 0, [VALUES[lane] for lane in hosting[position]], total)
            launcher.send("the reference sum" if bits(total) == EXPECTED else "another sum")
    except PeerLost as error:
        launcher.send(f"lost {error.peer.split(' (')[0]}")
    ring.close()
    listeners.close()
    launcher.send(f"threads {threading.active_count()}, descriptors {len(open_descriptors()) - len(before):+}")


ENDED = "threads 1, descriptors +0"


@pytest.fixture
def started() -> Iterator[Callable[[str, int], list[Process]]]:
    """Start a ring of processes on these hosts, for so many steps."""
    processes: list[Process] = []

    def start(hosts: str, steps: int) -> list[Process]:
        processes.extend(Process(run_worker, position, hosts, steps) for position in range(len(hosts)))
        addresses = [process.hear() for process in processes]
        for process in processes:
            process.ours.send(addresses)
        return processes

    yield start
    for process in processes:
        process.end()


def kinds(hosts: str) -> list[str]:
    """The links of each worker: to the previous and to the next."""
    behind = ["SharedLink" if hosts[i] == hosts[(i + 1) % len(hosts)] else "TcpLink" for i in range(len(hosts))]
    return [f"{behind[i - 1]} {behind[i]}" for i in range(len(hosts))]


@pytest.mark.parametrize(
    ("hosts", "slot"),
    [
        *((hosts, shared_link.SLOT) for hosts in ("AB", "ABC", "ABCD", "ABCDE", "AA", "AAB", "AABB", "AAABA")),
        *((hosts, 4096) for hosts in ("AA", "AAB", "AABB")),
    ],
)
def test_processes_reach_the_reference_sum_bit_for_bit_and_end(
    hosts: str, slot: int, started: Callable[[str, int], list[Process]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With slots of a page, every frame goes round the shared memory several times."""
    monkeypatch.setattr(shared_link, "SLOT", slot)
    processes = started(hosts, 3)
    told = [process.hear_to_the_end() for process in processes]
    assert told == [[kind] + ["the reference sum"] * 3 + [ENDED] for kind in kinds(hosts)]
    assert [process.process.exitcode for process in processes] == [0] * len(hosts)


@pytest.mark.parametrize("hosts", ["ABC", "AAB", "ABB", "AAA"])
def test_a_process_killed_while_it_sums_is_lost_to_its_neighbours_at_once(
    hosts: str, started: Callable[[str, int], list[Process]]
) -> None:
    processes = started(hosts, 10**6)
    for process, kind in zip(processes, kinds(hosts), strict=True):
        assert process.hear() == kind
        assert process.hear() == "the reference sum"
    processes[1].process.kill()
    killed = time.monotonic()
    told = [processes[position].hear_to_the_end() for position in (0, 2)]
    assert time.monotonic() - killed < 50
    assert [lines[-1] for lines in told] == [ENDED] * 2
    assert "lost worker 1" in [lines[-2] for lines in told]
    assert all(lines[-2].startswith("lost worker") for lines in told)
    assert {line for lines in told for line in lines[:-2]} <= {"the reference sum"}
