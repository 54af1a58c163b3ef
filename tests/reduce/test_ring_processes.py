"""The ring between real processes over TCP."""

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest
import torch

from quorate.core.errors import PeerLost
from quorate.core.generation import Generation, Member
from quorate.lanes.hosting import host_lanes
from quorate.reduce.neighbours import meet_neighbours
from quorate.reduce.ring import Ring
from quorate.wire.tcp import Listener
from reduce.reference import bits, reference_sum, wide_values
from wire.pairs import credentials, within

LANES = 5
VALUES = wide_values(LANES, 300_001, seed=3)
EXPECTED = bits(reference_sum(VALUES))
FORK = multiprocessing.get_context("fork")


class Process:
    """A worker in a process of its own, and what it tells."""

    def __init__(self, position: int, workers: int, steps: int) -> None:
        self.ours, theirs = FORK.Pipe()
        self.process = FORK.Process(target=run_worker, args=(position, workers, steps, theirs))
        self.process.start()
        theirs.close()

    def hear(self) -> str:
        assert self.ours.poll(10), "the process said nothing"
        return str(self.ours.recv())

    def hear_to_the_end(self) -> list[str]:
        lines = [self.hear()]
        while not lines[-1].startswith("threads"):
            lines.append(self.hear())
        self.process.join(10)
        return lines

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.ours.close()


def run_worker(position: int, workers: int, steps: int, launcher: Connection) -> None:
    # More threads than one would be those of the process it was forked from, which are not here.
    torch.set_num_threads(1)
    listener = Listener.bind("127.0.0.1")
    launcher.send(listener.address)
    hosting = host_lanes(LANES, workers)
    who = credentials(position)
    generation = Generation(who.generation, tuple(map(Member, range(workers), launcher.recv(), hosting)))
    ring = Ring(generation, position, *meet_neighbours(listener, generation, who, within(10)), within(10))
    try:
        for step in range(steps):
            total = torch.full_like(VALUES[0], -1)
            ring.all_reduce(step, 0, [VALUES[lane] for lane in hosting[position]], total)
            launcher.send("the reference sum" if bits(total) == EXPECTED else "another sum")
    except PeerLost as error:
        launcher.send(f"lost {error.peer.split(' (')[0]}")
    ring.close()
    listener.close()
    launcher.send(f"threads {threading.active_count()}")


@pytest.fixture
def started() -> Iterator[Callable[[int, int], list[Process]]]:
    """Start a ring of so many processes for so many steps."""
    processes: list[Process] = []

    def start(workers: int, steps: int) -> list[Process]:
        processes.extend(Process(position, workers, steps) for position in range(workers))
        addresses = [process.hear() for process in processes]
        for process in processes:
            process.ours.send(addresses)
        return processes

    yield start
    for process in processes:
        process.end()


@pytest.mark.parametrize("workers", range(2, LANES + 1))
def test_processes_reach_the_reference_sum_bit_for_bit_and_end(
    workers: int, started: Callable[[int, int], list[Process]]
) -> None:
    processes = started(workers, 3)
    told = [process.hear_to_the_end() for process in processes]
    assert told == [["the reference sum"] * 3 + ["threads 1"]] * workers
    assert [process.process.exitcode for process in processes] == [0] * workers


def test_a_process_killed_while_it_sums_is_lost_to_its_neighbours_at_once(
    started: Callable[[int, int], list[Process]],
) -> None:
    processes = started(3, 10**6)
    for process in processes:
        assert process.hear() == "the reference sum"
    processes[1].process.kill()
    killed = time.monotonic()
    told = [processes[position].hear_to_the_end() for position in (0, 2)]
    assert time.monotonic() - killed < 2
    assert [lines[-1] for lines in told] == ["threads 1"] * 2
    assert "lost worker 1" in [lines[-2] for lines in told]
    assert all(lines[-2].startswith("lost worker") for lines in told)
    assert {line for lines in told for line in lines[:-2]} <= {"the reference sum"}
