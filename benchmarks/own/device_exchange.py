"""Gradients of two workers of one GPU: summed in its memory, and by way of pinned memory of the host.

Then one of the two is killed while the other reads what it has shared: the reader must find every byte, and hear of it.
"""

import os
import secrets
import select
import signal
import statistics
import threading
import time
from typing import Any

import torch

from benchmarks.exchange import exchange_all, readings_of
from benchmarks.gang import Seat, run_gang
from benchmarks.own.allreduce import LOOPBACK, endpoint_of
from benchmarks.size import ELEMENT
from benchmarks.spans import Span
from benchmarks.told import answer, read_order
from quorate.collectives.connect import connect
from quorate.collectives.endpoint import Endpoint, Listeners
from quorate.collectives.memory import DeviceMemory, GradientMemory
from quorate.collectives.reduction import Reduction
from quorate.core.errors import LinkError
from quorate.cuda.reduction import DeviceGradients, DeviceReduction, Staged, connect_devices
from quorate.lanes.buckets import Bucket, TensorShape, plan_buckets
from quorate.replica.device import CPU, Device

PROCESSES = 2
BUCKET_MB = 25
READS = 20
"""Times that the shared memory is read while its owner is alive, and again once it is dead."""


class WholeExchange:
    """One worker with one lane, and all buckets of its gradient."""

    def __init__(self, reduction: Reduction, memory: GradientMemory, lane: int, device: DeviceMemory) -> None:
        self._reduction = reduction
        self._lane, self._total = memory.lanes[lane], memory.total
        self._device = device
        self._step = 0

    def fill(self, value: float) -> None:
        """Write the lane's gradient."""
        for bucket in self._lane:
            bucket.fill_(value)
        self._device.wait()

    def reduce(self) -> None:
        """Sum over all lanes, until the device has the sum."""
        self._step += 1
        if isinstance(self._reduction, DeviceReduction):
            self._reduction.all_reduce_together(self._step)
        else:
            for index, total in enumerate(self._total):
                self._reduction.all_reduce(self._step, index, [self._lane[index]], total)
            self._device.wait()

    def extremes(self) -> tuple[float, float]:
        """Of all buckets."""
        ends = [torch.aminmax(bucket) for bucket in self._total]
        return min(float(low) for low, _ in ends), max(float(high) for _, high in ends)


def main() -> None:
    """Answer the launcher."""
    order = read_order() | {"processes": PROCESSES}
    order["sizes"], order["repeats"] = [order["size"]], [order["repeats"]]
    torch.set_num_threads(1)
    token = secrets.token_urlsafe(16)
    everyone = run_gang(PROCESSES, lambda seat: _measure(seat, order, token))
    (shared,) = readings_of(order, [told["shared"] for told in everyone])
    (staged,) = readings_of(order, [told["staged"] for told in everyone])
    after_kill, _ = run_gang(PROCESSES, lambda seat: _kill(seat, order, token), may_die=(1,))
    staged_ms, shared_ms = statistics.median(staged["ms"]), statistics.median(shared["ms"])
    details = {"staged_ms": staged_ms, "of_staged": staged_ms / shared_ms, **after_kill}
    answer(shared | {"case": order["case"], "details": details})


def _measure(seat: Seat, order: dict[str, Any], token: str) -> dict[str, list[list[Span]]]:
    device = _device(order)
    spans = {}
    for way in ("shared", "staged"):
        listeners = Listeners.bind(LOOPBACK, shares_memory=True)
        addresses = seat.gather([listeners.network.address, listeners.local_address])
        endpoint = endpoint_of(seat, order, token, listeners, addresses)
        reduction, memory = (_shared if way == "shared" else _staged)(endpoint, _plan(order["size"]), device)
        exchanges = [WholeExchange(reduction, memory, seat.position, device.shareable)]
        spans[way] = exchange_all(order, seat.position, exchanges.__getitem__)
        reduction.close()
        listeners.close()
    return spans


def _kill(seat: Seat, order: dict[str, Any], token: str) -> dict[str, float]:
    device = _device(order)
    listeners = Listeners.bind(LOOPBACK, shares_memory=True)
    addresses = seat.gather([listeners.network.address, listeners.local_address])
    endpoint = endpoint_of(seat, order, token, listeners, addresses)
    reduction, memory = _shared(endpoint, _plan(order["size"]), device)
    for index, bucket in enumerate(memory.lanes[seat.position]):
        bucket.copy_(device.move(_values(bucket.numel(), index)))
    device.shareable.wait()
    victim = seat.gather(os.getpid())[1]
    if seat.position == 1:
        signal.pause()
    reading = _Reading(memory.all_lanes[1], device)
    process = os.pidfd_open(victim)
    reading.await_more(READS)
    os.kill(victim, signal.SIGKILL)
    killed = time.perf_counter()
    if not select.select([process], [], [], order["limit"])[0]:
        raise RuntimeError("the killed worker does not end")
    dead = time.perf_counter()
    reading.await_more(READS)
    reading.end()
    try:
        reduction.gather(1, 1, b"")
    except LinkError:
        lost_ms = (time.perf_counter() - dead) * 1000
    else:
        raise RuntimeError("nobody has noticed that a worker is dead")
    for index, bucket in enumerate(memory.all_lanes[1]):
        if not torch.equal(bucket.cpu(), _values(bucket.numel(), index)):
            raise RuntimeError("what the killed worker had shared has changed")
    return {"reads_over_a_kill": float(reading.times), "dead_ms": (dead - killed) * 1000, "lost_ms": lost_ms}


class _Reading:
    """A thread that copies what another worker has shared, again and again."""

    def __init__(self, shared: tuple[torch.Tensor, ...], device: Device) -> None:
        self.times = 0
        self._shared, self._device = shared, device
        self._is_over = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def await_more(self, times: int) -> None:
        enough = self.times + times
        while self.times < enough:
            if self._error is not None:
                raise self._error
            time.sleep(0.0005)

    def end(self) -> None:
        self._is_over = True
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            copies = [torch.empty_like(bucket) for bucket in self._shared]
            while not self._is_over:
                for copy, bucket in zip(copies, self._shared, strict=True):
                    copy.copy_(bucket)
                self._device.shareable.wait()
                self.times += 1
        except BaseException as error:
            self._error = error


def _shared(endpoint: Endpoint, plan: tuple[Bucket, ...], device: Device) -> tuple[Reduction, DeviceGradients]:
    reduction, memory = connect_devices(endpoint, plan, device.shareable, device.zeros)
    if not isinstance(memory, DeviceGradients):
        raise RuntimeError("the memory of the GPU cannot be shared here; the log says why")
    return reduction, memory


def _staged(endpoint: Endpoint, plan: tuple[Bucket, ...], device: Device) -> tuple[Reduction, GradientMemory]:
    links, host = connect(endpoint, plan, trusts_versions=True)
    own = endpoint.hosting[endpoint.position]
    return Staged(links, host, device.shareable), GradientMemory.of_process(plan, own, device.zeros)


def _device(order: dict[str, Any]) -> Device:
    if not order["is_gpu"]:
        return CPU
    from quorate.cuda.device import CudaDevice

    return CudaDevice("fp32")


def _plan(size: int) -> tuple[Bucket, ...]:
    """In buckets as a job has them."""
    most = BUCKET_MB * 2**20
    sizes = [min(most, size - start) for start in range(0, size, most)]
    return plan_buckets([TensorShape(f"t{i}", "torch.float32", ELEMENT, n // ELEMENT) for i, n in enumerate(sizes)], 1)


def _values(numel: int, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


if __name__ == "__main__":
    main()
