"""The ring between real processes over TCP."""

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from reduce.reference import bits, reference_sum, wide_values

LANES = 5
LENGTH = 300_001

WORKER = """
import hashlib, sys, threading
import torch
from quorate.core.errors import PeerLost
from quorate.core.generation import Generation, GenerationId, Member
from quorate.lanes.hosting import host_lanes
from quorate.reduce.neighbours import meet_neighbours
from quorate.reduce.ring import Ring
from quorate.wire.handshake import Credentials
from quorate.wire.tcp import Listener
from reduce.reference import bits, wide_values
from wire.pairs import within

torch.set_num_threads(1)
position, workers, lanes, length, steps = map(int, sys.argv[1:])
listener = Listener.bind("127.0.0.1")
print(listener.address, flush=True)
addresses = sys.stdin.readline().split()
hosting = host_lanes(lanes, workers)
generation = Generation(GenerationId(1, 1), tuple(map(Member, range(workers), addresses, hosting)))
credentials = Credentials("secret", position, generation.id)
ring = Ring(generation, position, *meet_neighbours(listener, generation, credentials, within(20)), within(20))
values = wide_values(lanes, length, seed=3)
total = torch.empty(length)
try:
    for step in range(steps):
        ring.all_reduce(step, 0, [values[lane] for lane in hosting[position]], total)
        print(hashlib.sha256(bits(total)).hexdigest(), flush=True)
        total.fill_(-1)
except PeerLost as error:
    print("lost", error.peer.split(" (")[0], flush=True)
ring.close()
listener.close()
print("threads", threading.active_count(), flush=True)
"""

Start = Callable[[int, int], list[subprocess.Popen[str]]]


@pytest.fixture
def started(request: pytest.FixtureRequest) -> Iterator[Start]:
    """Start a ring of so many processes for so many steps."""
    processes: list[subprocess.Popen[str]] = []
    path = [str(request.config.rootpath / "tests"), os.environ.get("PYTHONPATH", "")]

    def start(workers: int, steps: int) -> list[subprocess.Popen[str]]:
        for position in range(workers):
            process = subprocess.Popen(
                [sys.executable, "-c", WORKER, *map(str, (position, workers, LANES, LENGTH, steps))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
            )
            processes.append(process)
        addresses = [read_line(process) for process in processes]
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(" ".join(addresses) + "\n")
            process.stdin.flush()
        return processes

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def expected_digest() -> str:
    return hashlib.sha256(bits(reference_sum(wide_values(LANES, LENGTH, seed=3)))).hexdigest()


def test_processes_reach_the_reference_sum_bit_for_bit_and_end(started: Start) -> None:
    processes = started(2, 3)
    told = [process.communicate(timeout=20)[0].splitlines() for process in processes]
    assert told == [[expected_digest()] * 3 + ["threads 1"]] * 2
    assert [process.returncode for process in processes] == [0, 0]


def test_a_process_killed_while_it_sums_is_lost_to_its_neighbours_at_once(started: Start) -> None:
    processes = started(3, 10**6)
    assert [read_line(process) for process in processes] == [expected_digest()] * 3
    processes[1].kill()
    killed = time.monotonic()
    told = [processes[position].communicate(timeout=20)[0].splitlines() for position in (0, 2)]
    assert time.monotonic() - killed < 2
    assert [lines[-1] for lines in told] == ["threads 1"] * 2
    losses = [lines[-2] for lines in told]
    assert "lost worker 1" in losses
    assert all(loss.startswith("lost worker") for loss in losses)
    assert {line for lines in told for line in lines[:-2]} <= {expected_digest()}
