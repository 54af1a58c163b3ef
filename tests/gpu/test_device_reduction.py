"""Sums in the memory of devices, which here is the host's: workers are threads."""

import gc
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.reference import bits, reference_sum, wide_values
from collectives.rings import meeting
from gpu.host_memory import HostMemory
from quorate.collectives.endpoint import Endpoint
from quorate.collectives.memory import DeviceMemory, GradientMemory, NotShareable, zeros
from quorate.collectives.reduction import Reduction
from quorate.core.errors import GenerationOver, LinkError
from quorate.cuda.reduction import DeviceReduction, Staged, connect_devices
from quorate.lanes.buckets import Bucket, TensorShape, plan_buckets
from wire.pairs import open_descriptors

Met = list[tuple[Reduction, GradientMemory]]


def plan_of(*buckets: tuple[int, torch.dtype]) -> tuple[Bucket, ...]:
    shapes = [
        TensorShape(f"t{index}", str(dtype), dtype.itemsize, numel) for index, (numel, dtype) in enumerate(buckets)
    ]
    return tuple(reversed(plan_buckets(shapes, bucket_mb=1e-6)))


PLAN = plan_of((1001, torch.float32), (7, torch.float32))


@contextmanager
def workers(hosting: Sequence[range], plan: Sequence[Bucket], *devices: DeviceMemory) -> Iterator[Met]:
    """Workers of one host that have met; `devices` are those of the first, the others have plain ones."""

    def join(position: int, endpoint: Endpoint) -> tuple[Reduction, GradientMemory]:
        device = devices[position] if position < len(devices) else HostMemory()
        return connect_devices(endpoint, plan, device, zeros)

    with meeting(hosting) as endpoints:
        with ThreadPoolExecutor(len(hosting)) as threads:
            met = list(threads.map(join, range(len(hosting)), endpoints))
        try:
            yield met
        finally:
            for reduction, _ in met:
                reduction.close()


def everywhere(met: Met, work: Callable[[Reduction, GradientMemory], object]) -> list[object]:
    with ThreadPoolExecutor(len(met)) as threads:
        return list(threads.map(lambda one: work(*one), met))


def sum_up(met: Met, values: Sequence[Sequence[torch.Tensor]], step: int = 1, *, together: bool) -> list[object]:
    """The bits of all buckets on every worker; `values` has those of each bucket, lane by lane."""

    def work(reduction: Reduction, memory: GradientMemory) -> list[bytes]:
        for lane, buckets in memory.lanes.items():
            for bucket, of_bucket in zip(buckets, values, strict=True):
                bucket.copy_(of_bucket[lane])
        if together:
            assert isinstance(reduction, DeviceReduction)
            reduction.all_reduce_together(step)
        else:
            for index, total in enumerate(memory.total):
                reduction.all_reduce(step, index, [buckets[index] for buckets in memory.lanes.values()], total)
        return [bits(total) for total in memory.total]

    return everywhere(met, work)


def values_of(plan: Sequence[Bucket], lanes: int, seed: int) -> list[list[torch.Tensor]]:
    return [
        [
            value.to(getattr(torch, bucket.dtype.removeprefix("torch.")))
            for value in wide_values(lanes, bucket.numel, seed)
        ]
        for bucket in plan
    ]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_sums_have_the_bits_of_the_ring_for_any_hosting_and_buckets(data: st.DataObject) -> None:
    lanes = data.draw(st.integers(2, 7), label="lanes")
    starts = data.draw(st.sets(st.integers(1, lanes - 1), min_size=1), label="where workers begin")
    hosting = [range(*ends) for ends in pairwise([0, *sorted(starts), lanes])]
    types = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
    buckets = data.draw(st.lists(st.tuples(st.integers(1, 300), types), min_size=1, max_size=3), label="buckets")
    plan = plan_of(*buckets)
    with workers(hosting, plan) as met:
        for step, together in ((1, True), (2, False)):
            values = values_of(plan, lanes, step)
            expected = [bits(reference_sum(of_bucket)) for of_bucket in values]
            assert sum_up(met, values, step, together=together) == [expected] * len(hosting)


def test_a_total_may_be_written_to_and_nobody_else_sees_it() -> None:
    values = values_of(PLAN, 3, 1)
    with workers([range(2), range(2, 3)], PLAN) as met:
        first = sum_up(met, values, together=True)
        met[0][1].total[0].mul_(0.5)
        assert bits(met[1][1].total[0]) == first[1][0]  # type: ignore[index]
        assert sum_up(met, values, 2, together=True) == first


def test_each_worker_waits_for_its_device_before_it_meets_the_others() -> None:
    class Counting(HostMemory):
        waits = 0

        def wait(self) -> None:
            self.waits += 1

    device = Counting()
    with workers([range(1), range(1, 2)], PLAN, device) as met:
        sum_up(met, values_of(PLAN, 2, 1), together=True)
    assert device.waits == 3


@pytest.mark.parametrize("meeting", [0, 1, 2])
def test_nobody_goes_on_while_the_device_of_another_is_busy(meeting: int) -> None:
    """Be it with what it writes, with what it sums, or with what it reads."""

    class Busy(HostMemory):
        def __init__(self) -> None:
            self.left, self.is_busy, self.goes_on = meeting, threading.Event(), threading.Event()

        def wait(self) -> None:
            if self.left == 0:
                self.is_busy.set()
                assert self.goes_on.wait(60)
            self.left -= 1

    def work(reduction: Reduction) -> None:
        assert isinstance(reduction, DeviceReduction)
        reduction.all_reduce_together(1)

    device = Busy()
    with workers([range(1), range(1, 2)], PLAN, device) as met, ThreadPoolExecutor(2) as threads:
        sums = [threads.submit(work, reduction) for reduction, _ in met]
        assert device.is_busy.wait(60)
        with pytest.raises(TimeoutError):
            sums[1].result(timeout=0.1)
        device.goes_on.set()
        for one in sums:
            one.result(timeout=60)


class Elsewhere(HostMemory):
    def place(self) -> str:
        return "another device"

    def create(self, size: int) -> tuple[torch.Tensor, int]:
        raise AssertionError("nobody would read it")


class CannotCreate(HostMemory):
    def create(self, size: int) -> tuple[torch.Tensor, int]:
        raise NotShareable("there is nothing to share")


class CannotAdopt(HostMemory):
    def adopt(self, descriptor: int, size: int) -> torch.Tensor:
        raise NotShareable("it cannot be mapped")


@pytest.mark.parametrize(
    ("device", "why"),
    [
        (Elsewhere(), "the workers compute on different devices"),
        (CannotCreate(), "worker 10: there is nothing to share"),
        (CannotAdopt(), "worker 10: it cannot be mapped"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, HostMemory) else "",
)
def test_where_one_worker_cannot_nobody_does_and_the_bits_are_the_same(
    device: HostMemory, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    values = values_of(PLAN, 4, 1)
    expected = [bits(reference_sum(of_bucket)) for of_bucket in values]
    with caplog.at_level(logging.INFO), workers([range(1), range(1, 3), range(3, 4)], PLAN, device) as met:
        assert [type(reduction) for reduction, _ in met] == [Staged] * 3
        assert sum_up(met, values, together=False) == [expected] * 3
    told = [record for record in caplog.records if why in record.message]
    # Several GPUs are nothing to warn of.
    loudest = logging.INFO if isinstance(device, Elsewhere) else logging.WARNING
    assert sorted(record.levelno for record in told) == [logging.INFO, logging.INFO, loudest]


@pytest.mark.parametrize("device", [HostMemory(), CannotAdopt()], ids=["shared", "refused"])
def test_no_descriptor_is_left_open(device: HostMemory) -> None:
    before = open_descriptors()
    with workers([range(1), range(1, 2)], PLAN, device) as met:
        sum_up(met, values_of(PLAN, 2, 1), together=False)
    # A mapping has a descriptor of its own, which goes with the last tensor over it.
    met.clear()
    gc.collect()
    assert open_descriptors() <= before


def test_whoever_waits_for_one_that_does_not_answer_notices_the_end_of_the_generation() -> None:
    asked, is_over = threading.Event(), threading.Event()

    class Hanging(HostMemory):
        def create(self, size: int) -> tuple[torch.Tensor, int]:
            asked.set()
            assert is_over.wait(60)
            return super().create(size)

    def deadline() -> float:
        if asked.is_set():
            is_over.set()
            raise GenerationOver("another generation has been formed")
        return 1.0

    def join(endpoint: Endpoint) -> None:
        connect_devices(endpoint, PLAN, Hanging() if endpoint.position else HostMemory(), zeros)

    with meeting([range(1), range(1, 2)], deadline=deadline) as endpoints, ThreadPoolExecutor(2) as threads:
        for one in [threads.submit(join, endpoint) for endpoint in endpoints]:
            with pytest.raises(LinkError):
                one.result(timeout=60)


def test_only_the_memory_of_the_devices_is_summed() -> None:
    with (
        workers([range(1), range(1, 2)], PLAN) as met,
        pytest.raises(ValueError, match="bucket 1 of the devices' memory"),
    ):
        met[0][0].all_reduce(1, 1, [], torch.zeros(7))


def test_a_device_that_fails_while_it_sums_ends_the_exchange_for_all() -> None:
    class Broken(HostMemory):
        def add_up(self, terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
            raise RuntimeError("an illegal memory access was encountered")

    def work(reduction: Reduction, memory: GradientMemory) -> str:
        assert isinstance(reduction, DeviceReduction)
        try:
            reduction.all_reduce_together(1)
        except (RuntimeError, LinkError) as error:
            return type(error).__name__
        return "summed"

    with workers([range(1), range(1, 2)], PLAN, Broken()) as met:
        assert everywhere(met, work) == ["RuntimeError", "PeerLost"]
