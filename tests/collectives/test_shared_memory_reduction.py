import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from collectives.reference import bits, reference_sum, wide_values
from collectives.rings import meeting
from quorate.collectives import shared_memory
from quorate.collectives.connect import connect
from quorate.collectives.endpoint import Endpoint, Listeners
from quorate.collectives.reduction import STRETCH
from quorate.collectives.shared_memory import SharedMemory, SharedMemoryReduction
from quorate.core.errors import FrameError, JobError, LinkError, PeerLost
from quorate.core.generation import Generation, GenerationId, Member
from quorate.lanes.buckets import Bucket, TensorShape, plan_buckets
from quorate.lanes.chunks import host_lanes
from quorate.wire.handshake import Credentials
from quorate.wire.shared_memory import LONGEST_MESSAGE, Segment
from wire.pairs import within

NUMEL = 1001
EVERY_CASE = [(lanes, workers) for lanes in range(2, 7) for workers in range(2, lanes + 1)]


def plan_of(*numels: int) -> tuple[Bucket, ...]:
    """One bucket for each number of elements."""
    shapes = [TensorShape(f"t{numel}", "torch.float32", 4, numel) for numel in reversed(numels)]
    return plan_buckets(shapes, bucket_mb=1e-6)


@contextlib.contextmanager
def reductions(lanes: int, workers: int, plan: Sequence[Bucket]) -> Iterator[list[SharedMemoryReduction]]:
    """Workers of one host that have met, as threads of this process."""

    def join(endpoint: Endpoint) -> SharedMemoryReduction:
        reduction, memory = connect(endpoint, plan)
        assert isinstance(reduction, SharedMemoryReduction)
        assert reduction.memory is memory
        return reduction

    with meeting(host_lanes(lanes, workers)) as endpoints, ThreadPoolExecutor(workers) as threads:
        met = list(threads.map(join, endpoints))
    try:
        yield met
    finally:
        for reduction in met:
            reduction.close()


def everywhere(met: list[SharedMemoryReduction], work: Callable[[int, SharedMemoryReduction], object]) -> list[object]:
    with ThreadPoolExecutor(len(met)) as threads:
        return list(threads.map(work, range(len(met)), met))


def sum_buckets(met: list[SharedMemoryReduction], lane_values: list[torch.Tensor], step: int = 1) -> list[object]:
    def work(position: int, reduction: SharedMemoryReduction) -> bytes:
        for lane, buckets in reduction.memory.lanes.items():
            buckets[0].copy_(lane_values[lane])
        reduction.all_reduce(step, 0, [], reduction.memory.total[0])
        return bits(reduction.memory.total[0])

    return everywhere(met, work)


@pytest.mark.parametrize(("lanes", "workers"), EVERY_CASE)
def test_the_sum_has_the_bits_of_the_ring_on_any_number_of_workers(lanes: int, workers: int) -> None:
    lane_values = wide_values(lanes, NUMEL, seed=lanes)
    with reductions(lanes, workers, plan_of(NUMEL)) as met:
        for step in (1, 2):
            assert set(sum_buckets(met, lane_values, step)) == {bits(reference_sum(lane_values))}


def test_another_order_has_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    lane_values = wide_values(4, NUMEL, seed=1)
    monkeypatch.setattr(shared_memory, "summation_order", lambda chunk, lanes: tuple(range(lanes)))
    with reductions(4, 2, plan_of(NUMEL)) as met:
        assert bits(reference_sum(lane_values)) not in sum_buckets(met, lane_values)


@pytest.mark.parametrize("numel", [1, 3, 2 * STRETCH + 1])
def test_awkward_lengths_and_blocks(numel: int) -> None:
    lane_values = wide_values(5, numel, seed=2)
    with reductions(5, 2, plan_of(numel)) as met:
        assert set(sum_buckets(met, lane_values)) == {bits(reference_sum(lane_values))}


def test_only_its_own_memory_is_summed() -> None:
    with reductions(2, 2, plan_of(NUMEL)) as met, pytest.raises(ValueError, match="bucket 0 of the shared memory"):
        met[0].all_reduce(1, 0, [torch.zeros(NUMEL)], torch.zeros(NUMEL))


def test_an_optimizer_that_writes_to_gradients_disturbs_nobody_and_only_until_the_next_sum() -> None:
    lane_values = wide_values(2, NUMEL, seed=4)
    expected = bits(reference_sum(lane_values))
    with reductions(2, 2, plan_of(NUMEL)) as met:
        for reduction in met:
            reduction._trusts_versions = True
        assert set(sum_buckets(met, lane_values)) == {expected}
        met[0].memory.total[0].mul_(0.5)
        assert bits(met[0].memory.total[0]) != expected
        assert bits(met[1].memory.total[0]) == expected
        assert set(sum_buckets(met, lane_values, step=2)) == {expected}
        # Past torch, nobody counts: then every sum starts from the shared total.
        met[0]._trusts_versions = False
        met[0].memory.total[0].numpy()[:] = 7.0
        assert set(sum_buckets(met, lane_values, step=3)) == {expected}


@pytest.mark.parametrize("sizes", [(0, 0, 0), (5, 0, 3), (LONGEST_MESSAGE, 1, 2 * LONGEST_MESSAGE + 5)])
def test_payloads_of_any_length_are_gathered_in_ring_order(sizes: tuple[int, ...]) -> None:
    payloads = tuple(bytes([position]) * size for position, size in enumerate(sizes))
    with reductions(3, 3, plan_of(NUMEL)) as met:
        told = everywhere(met, lambda position, reduction: reduction.gather(1, 0, payloads[position]))
        assert told == [payloads] * 3


def test_workers_that_are_at_different_steps_do_not_sum() -> None:
    with reductions(2, 2, plan_of(NUMEL)) as met:

        def work(position: int, reduction: SharedMemoryReduction) -> str:
            try:
                reduction.all_reduce(1 + position, 0, [], reduction.memory.total[0])
            except LinkError as error:
                return str(error)
            return "summed"

        told = [str(one) for one in everywhere(met, work)]
    assert "sum 0 at step 2 where 'w' of sum 0 at step 1 is expected" in told[0]
    assert "summed" not in told


def test_a_reduction_that_is_closed_here_or_there_ends_every_wait_at_once() -> None:
    with reductions(3, 3, plan_of(NUMEL)) as met, ThreadPoolExecutor(2) as threads:
        waits = [threads.submit(reduction.gather, 1, 0, b"") for reduction in met[:2]]
        began = time.monotonic()
        met[2].close()
        for wait in waits:
            with pytest.raises(PeerLost):
                wait.result(timeout=60)
        assert time.monotonic() - began < 50
        with pytest.raises(PeerLost, match="closed on this side"):
            met[2].gather(1, 0, b"")


def test_a_killed_worker_is_noticed_and_its_memory_is_given_back() -> None:
    """Its neighbour learns of it by the end of their connection."""
    ours, theirs = socket.socketpair()
    listeners = Listeners.bind("127.0.0.1", shares_memory=True)
    pid = os.fork()
    if pid == 0:
        signal.alarm(200)
        own = Listeners.bind("127.0.0.1", shares_memory=True)
        theirs.sendall(f"{own.network.address} {own.local_address}".encode())
        generation = _pair(theirs.recv(1000).decode().split(), [own.network.address, own.local_address])
        reduction, _ = connect(_endpoint(generation, 1, own), plan_of(NUMEL))
        reduction.gather(1, 0, b"here")
        theirs.sendall(b"met")
        signal.pause()
    theirs.close()
    there = ours.recv(1000).decode().split()
    ours.sendall(f"{listeners.network.address} {listeners.local_address}".encode())
    generation = _pair([listeners.network.address, listeners.local_address], there)
    reduction, _ = connect(_endpoint(generation, 0, listeners), plan_of(NUMEL))
    assert reduction.gather(1, 0, b"here") == (b"here", b"here")
    assert ours.recv(3) == b"met"
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(PeerLost, match=r"worker 1 \(this host\) is gone"):
        reduction.gather(2, 0, b"")
    assert time.monotonic() - killed < 50
    os.waitpid(pid, 0)
    reduction.close()
    listeners.close()
    ours.close()


def _pair(first: list[str], second: list[str]) -> Generation:
    members = tuple(Member(i, where[0], range(i, i + 1), where[1]) for i, where in enumerate((first, second)))
    return Generation(GenerationId(1, 1), members)


def _endpoint(generation: Generation, worker: int, listeners: Listeners) -> Endpoint:
    return Endpoint(generation, Credentials("token", worker, generation.id), listeners, within(100), within(100))


def test_memory_that_could_be_taken_away_again_is_refused() -> None:
    loose = os.memfd_create("loose")
    os.ftruncate(loose, 64)
    with pytest.raises(FrameError, match="could take away"):
        Segment.adopt(loose, 64)
    small = Segment.create(64)
    with pytest.raises(FrameError, match="64 bytes of memory where 128 were expected"):
        Segment.adopt(os.dup(small.descriptor), 128)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(small.descriptor, 0)
    small.close()


def test_too_little_memory_is_an_error_before_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobError, match="not enough memory"):
        Segment.create(2**50)
    monkeypatch.setattr("quorate.wire.shared_memory.machine_memory", lambda: 1_999)
    with pytest.raises(JobError, match=r"not enough memory for the 2,000 bytes .*\(1,999 are free\).* fewer `workers`"):
        Segment.create(2_000)


def test_no_thread_serves_it() -> None:
    before = threading.active_count()
    with reductions(2, 2, plan_of(NUMEL)) as met:
        assert isinstance(met[0].memory, SharedMemory)
        assert threading.active_count() <= before
