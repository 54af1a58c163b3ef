"""Workers in processes of their own that share the memory of a device, here the host's, and one that is killed."""

import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection

import pytest
import torch

from collectives.forked import Forked
from collectives.reference import bits, reference_sum, wide_values
from gpu.host_memory import HostMemory
from quorate.collectives.endpoint import Endpoint, Listeners
from quorate.collectives.memory import zeros
from quorate.core.errors import LinkError, PeerLost
from quorate.core.generation import Generation, Member
from quorate.cuda.reduction import DeviceGradients, DeviceReduction, connect_devices
from quorate.lanes.buckets import TensorShape, plan_buckets
from wire.pairs import credentials, open_descriptors, within

HOSTING = [range(1), range(1, 3), range(3, 4)]
NUMEL = 100_003
VALUES = wide_values(4, NUMEL, seed=3)
EXPECTED = bits(reference_sum(VALUES))
PLAN = plan_buckets([TensorShape("t", "torch.float32", 4, NUMEL)], bucket_mb=1)
VICTIM = 1


class Mortal(HostMemory):
    """Dies by its own hand when it comes to the so-manieth call of a kind, counted from when it is armed."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}

    def wait(self) -> None:
        self._count("wait")

    def add_up(self, terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        half = out.numel() // 2
        super().add_up([term[:half] for term in terms], out[:half])
        self._count("add_up")
        super().add_up([term[half:] for term in terms], out[half:])

    def _count(self, call: str) -> None:
        if call in self.left:
            self.left[call] -= 1
            if self.left[call] < 0:
                os.kill(os.getpid(), signal.SIGKILL)


class Witness(HostMemory):
    """Lets another worker be killed in the middle of a read of its memory, sees it dead, and reads on."""

    def __init__(self, launcher: Connection) -> None:
        self._launcher = launcher

    def add_up(self, terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        half = out.numel() // 2
        super().add_up([term[:half] for term in terms], out[:half])
        self._launcher.send("reading")
        assert self._launcher.recv() == "it is dead"
        super().add_up([term[half:] for term in terms], out[half:])
        self._launcher.send("read to the end")


def run_worker(position: int, device: str, launcher: Connection) -> None:
    torch.set_num_threads(1)
    before = len(open_descriptors())
    listeners = Listeners.bind("127.0.0.1", shares_memory=True)
    launcher.send([listeners.network.address, listeners.local_address])
    members = (Member(i, told[0], HOSTING[i], told[1]) for i, told in enumerate(launcher.recv()))
    who = credentials(position)
    endpoint = Endpoint(Generation(who.generation, tuple(members)), who, listeners, within(100), within(100))
    memory_of_device = Witness(launcher) if device == "witness" else Mortal()
    reduction, memory = connect_devices(endpoint, PLAN, memory_of_device, zeros)
    assert isinstance(reduction, DeviceReduction)
    assert isinstance(memory, DeviceGradients)
    launcher.send("met")
    for step in range(2):
        for lane in HOSTING[position]:
            memory.lanes[lane][0].copy_(VALUES[lane])
        if step == 1 and isinstance(memory_of_device, Mortal):
            memory_of_device.left = launcher.recv()
        try:
            reduction.all_reduce_together(step)
            launcher.send("the sum of the ring" if bits(memory.total[0]) == EXPECTED else "another sum")
            reduction.gather(step, 1, b"")
        except LinkError as error:
            launcher.send(f"lost {error.peer}" if isinstance(error, PeerLost) else str(error))
            # What the dead one has shared is there for as long as it is looked at.
            readable = all(bits(memory.all_lanes[lane][0]) == bits(VALUES[lane]) for lane in range(len(VALUES)))
            launcher.send("its lanes can be read" if readable else "its lanes are damaged")
    reduction.close()
    listeners.close()
    del reduction, memory, endpoint
    launcher.send(f"descriptors {len(open_descriptors()) - before:+}")


class Worker(Forked):
    def die(self) -> None:
        pidfd = os.pidfd_open(self.process.pid or 0)
        os.kill(self.process.pid or 0, signal.SIGKILL)
        assert select.select([pidfd], [], [], 60)[0], "a killed process ends"
        os.close(pidfd)


@pytest.fixture
def start() -> Iterator[Callable[..., list[Worker]]]:
    """Workers that have met and summed once; `devices` are their kinds."""
    started: list[Worker] = []

    def start(*devices: str) -> list[Worker]:
        started.extend(Worker(run_worker, position, device) for position, device in enumerate(devices))
        addresses = [worker.ours.recv() for worker in started]
        for worker in started:
            worker.ours.send(addresses)
        assert [worker.hear() for worker in started] == ["met"] * len(devices)
        return started

    yield start
    for worker in started:
        worker.end()


PHASES = [{"wait": 0}, {"add_up": 0}, {"add_up": 1}, {"wait": 1}, {"wait": 2}]
"""Before the others may read its lanes; in the first and the last sum; before they may read its sums; before it has
said that it has read theirs."""


@pytest.mark.parametrize("phase", PHASES, ids=str)
def test_a_worker_killed_in_any_phase_is_lost_to_the_others_at_once(
    phase: dict[str, int], start: Callable[..., list[Worker]]
) -> None:
    workers = start("mortal", "mortal", "mortal")
    assert [worker.hear() for worker in workers] == ["the sum of the ring"] * 3
    for position, worker in enumerate(workers):
        worker.ours.send(phase if position == VICTIM else {})
    began = time.monotonic()
    for worker in (workers[0], workers[2]):
        assert worker.hear().startswith("lost worker ")
        assert worker.hear() == "its lanes can be read"
        assert worker.hear() == "descriptors +0"
    assert time.monotonic() - began < 50
    workers[VICTIM].process.join(60)
    assert workers[VICTIM].process.exitcode == -signal.SIGKILL, "the kill did not fire"


def test_a_reader_reads_on_when_the_one_that_it_reads_from_is_killed(start: Callable[..., list[Worker]]) -> None:
    witness, victim, third = start("witness", "mortal", "mortal")
    assert witness.hear() == "reading"
    victim.die()
    witness.ours.send("it is dead")
    assert witness.hear() == "read to the end"
    assert witness.hear().startswith("lost worker ")
    assert witness.hear() == "its lanes can be read"
    assert third.hear().startswith("lost worker ")
