"""The sums of the ring for workers that compute on devices: in the devices' memory where all of them see it, else by
way of the host's.

In the devices' memory chunk c is summed by the worker that hosts lane c, in ring order of lanes, from where the lanes
lie; then everybody copies what the others have summed. What a device has not finished nobody is told of: each worker
waits for its own device and then for the others, so nothing that runs on a device waits for another worker.
"""

import contextlib
import logging
import os
import weakref
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from quorate.collectives.connect import connect
from quorate.collectives.endpoint import Endpoint
from quorate.collectives.memory import Allocate, DeviceMemory, GradientMemory, NotShareable, dtype_of, layout_of
from quorate.collectives.reduction import Alone, Reduction
from quorate.collectives.shared_memory import SharedMemory, SharedMemoryReduction
from quorate.core.errors import OutOfMemory
from quorate.core.generation import Generation, name_of
from quorate.core.spans import BUCKET, SpanRecorder
from quorate.lanes.buckets import Bucket
from quorate.lanes.chunks import cut, summation_order

log = logging.getLogger(__name__)

PLACED, CREATED, ADOPTED = 11, 12, 13
"""Tell apart what is gathered to agree."""


class SeveralDevices(NotShareable):
    """As on any machine of several GPUs: nothing is wrong."""


class DeviceGradients(GradientMemory):
    """The lanes of all workers, and each worker's total. A worker writes to its own alone."""

    def __init__(
        self, plan: Sequence[Bucket], hosting: Sequence[range], position: int, pieces: Sequence[torch.Tensor]
    ) -> None:
        size = layout_of(plan).size
        self.all_lanes: dict[int, tuple[torch.Tensor, ...]] = {}
        self.totals: list[tuple[torch.Tensor, ...]] = []
        for lanes, piece in zip(hosting, pieces, strict=True):
            for index, lane in enumerate(lanes):
                self.all_lanes[lane] = _buckets_in(piece, plan, index * size)
            self.totals.append(_buckets_in(piece, plan, len(lanes) * size))
        super().__init__({lane: self.all_lanes[lane] for lane in hosting[position]}, self.totals[position])


def size_of(plan: Sequence[Bucket], hosted: range) -> int:
    """Bytes that a worker shares: its lanes, and behind them its total."""
    return (len(hosted) + 1) * layout_of(plan).size


class Wrapped:
    """A `Reduction` by way of another one, which it owns. By itself it does not overlap with the backward pass."""

    overlaps = False

    def __init__(self, links: Reduction) -> None:
        self._links = links

    @property
    def spans(self) -> SpanRecorder | None:
        """Where it times its parts."""
        return self._links.spans

    @spans.setter
    def spans(self, spans: SpanRecorder | None) -> None:
        self._links.spans = spans

    def all_reduce(self, step: int, index: int, lane_values: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        self._links.all_reduce(step, index, lane_values, total)

    def gather(self, step: int, index: int, payload: bytes) -> tuple[bytes, ...]:
        return self._links.gather(step, index, payload)

    def broadcast(self, step: int, index: int, root: int, buffer: memoryview, receivers: Collection[int]) -> None:
        self._links.broadcast(step, index, root, buffer, receivers)

    def round_trip(self) -> float | None:
        return self._links.round_trip()

    def bytes_passed(self, elements: int, itemsize: int) -> int:
        return self._links.bytes_passed(elements, itemsize)

    def close(self) -> None:
        self._links.close()


class DeviceReduction(Wrapped):
    """One worker's place among workers of one host. `links` is how they meet, and what carries everything else."""

    def __init__(
        self,
        links: SharedMemoryReduction,
        generation: Generation,
        worker: int,
        memory: DeviceGradients,
        device: DeviceMemory,
    ) -> None:
        super().__init__(links)
        self._shared = links
        self._hosting = [member.lanes for member in generation.members]
        self._position = generation.position(worker)
        self._memory = memory
        self._device = device

    def all_reduce(self, step: int, index: int, lane_values: Sequence[torch.Tensor], total: torch.Tensor) -> None:  # noqa: ARG002
        """Lanes and total are bucket `index` of the memory of the devices, where they are read and written in place."""
        if total is not self._memory.total[index]:
            raise ValueError(f"sum {index} is of bucket {index} of the devices' memory: give it that total")
        self._sum(step, range(index, index + 1))

    def all_reduce_together(self, step: int) -> None:
        """Sum all buckets: what takes time is to wait for the devices, and that is the same for one and for many."""
        self._sum(step, range(len(self._memory.total)))

    def bytes_passed(self, elements: int, itemsize: int) -> int:
        """As in shared memory: what others read of this worker's lanes, and of the sums that it has formed."""
        return self._shared.bytes_passed(elements, itemsize)

    def _sum(self, step: int, indices: range) -> None:
        spans = self.spans
        began = 0.0 if spans is None else spans.clock()
        with self._shared.exchange():
            # Everybody's lanes are written, and everybody is done with the totals of the step before.
            self._meet(b"w", step, indices)
            for index in indices:
                self._sum_own_chunks(index)
            self._meet(b"s", step, indices)
            for index in indices:
                self._copy_others(index)
            # Everybody has read our lanes and our sums: both may be written to.
            self._meet(b"c", step, indices)
        if spans is not None:
            spans.add(BUCKET, began, spans.exchange, bucket=indices.start)

    def _meet(self, what: bytes, step: int, indices: range) -> None:
        self._device.wait()
        self._shared.barrier(what, step, indices.stop)

    def _sum_own_chunks(self, index: int) -> None:
        total, lanes = self._memory.total[index], len(self._memory.all_lanes)
        chunks = cut(total.numel(), lanes)
        for chunk in self._hosting[self._position]:
            place = chunks[chunk]
            if place.start < place.stop:
                order = summation_order(chunk, lanes)
                self._device.add_up([self._memory.all_lanes[lane][index][place] for lane in order], total[place])

    def _copy_others(self, index: int) -> None:
        total = self._memory.total[index]
        chunks = cut(total.numel(), len(self._memory.all_lanes))
        for position, hosted in enumerate(self._hosting):
            if position != self._position and hosted:
                # Lanes of a worker are neighbours, and so are their chunks.
                place = slice(chunks[hosted[0]].start, chunks[hosted[-1]].stop)
                total[place].copy_(self._memory.totals[position][index][place], non_blocking=True)


class Staged(Wrapped):
    """A `Reduction` of tensors on a device. The lanes are copied to the host, summed there in the ring's order, and the
    sum is copied back: additions are rounded alike here and there, so the bits are the same.
    """

    def __init__(self, links: Reduction, host: GradientMemory, device: DeviceMemory) -> None:
        super().__init__(links)
        self._host = host
        self._device = device
        self._sums = pinned_totals(self, host, device)

    def all_reduce(self, step: int, index: int, lane_values: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        lanes = [buckets[index] for buckets in self._host.lanes.values()]
        for staged, value in zip(lanes, lane_values, strict=True):
            staged.copy_(value, non_blocking=True)
        self._device.wait()
        super().all_reduce(step, index, lanes, self._host.total[index])
        # Until it is copied: something else may be passed through this memory next.
        total.copy_(self._sums[index])


def pinned_totals(owner: object, host: GradientMemory, device: DeviceMemory) -> tuple[torch.Tensor, ...]:
    """Where the device copies totals from. What is shared of the host's memory is pinned while the owner lives.

    A page of a private view that the device kept hold of would not change any more: so it is the view of all.
    """
    if not isinstance(host, SharedMemory):
        return host.total
    for region in host.regions:
        weakref.finalize(owner, device.pin(region)).atexit = False
    return host.shared_total


def _buckets_in(piece: torch.Tensor, plan: Sequence[Bucket], start: int) -> tuple[torch.Tensor, ...]:
    return tuple(
        piece[start + offset :][: bucket.numel * dtype_of(bucket).itemsize].view(dtype_of(bucket))
        for bucket, offset in zip(plan, layout_of(plan).offsets, strict=True)
    )


# --- how they connect


def connect_devices(
    endpoint: Endpoint,
    plan: Sequence[Bucket],
    device: DeviceMemory,
    allocate: Allocate,
    *,
    trusts_versions: bool = False,
) -> tuple[Reduction, GradientMemory]:
    """Sums over all lanes of the generation, and the memory of this device in which they are formed.

    `allocate` gives memory there that nobody else sees.
    """
    if plan and endpoint.is_on_one_host:
        shared = _share(endpoint, plan, device)
        if shared is not None:
            return shared
    own: Reduction = Alone()  # who is alone sums on the device, and needs nothing on the host
    if len(endpoint.generation.members) > 1:
        links, host = connect(endpoint, plan, trusts_versions=trusts_versions, allocate=device.zeros_on_host)
        own = Staged(links, host, device)
    return own, GradientMemory.of_process(plan, endpoint.hosting[endpoint.position], allocate)


def _share(
    endpoint: Endpoint, plan: Sequence[Bucket], device: DeviceMemory
) -> tuple[DeviceReduction, DeviceGradients] | None:
    """None where somebody cannot; then nobody does, and all connections are closed again."""
    # To agree is part of connecting: whoever waits for one that does not answer looks whether the generation is over.
    links, _ = connect(replace(endpoint, lease=endpoint.deadline), ())
    assert isinstance(links, SharedMemoryReduction), "workers of one host share memory"
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(links.close)
        try:
            pieces = _pieces(endpoint, plan, device, links)
        except NotShareable as why:
            # Everybody has heard the same, and one voice is enough.
            level = logging.WARNING if endpoint.position == 0 and not isinstance(why, SeveralDevices) else logging.INFO
            log.log(level, "gradients are summed by way of the host's memory: %s", str(why))
            return None
        on_failure.pop_all()
    links.deadline = endpoint.lease
    log.info("gradients are summed in the memory of the devices: all %d workers see it", len(pieces))
    memory = DeviceGradients(plan, endpoint.hosting, endpoint.position, pieces)
    return DeviceReduction(links, endpoint.generation, endpoint.credentials.worker, memory, device), memory


def _pieces(
    endpoint: Endpoint, plan: Sequence[Bucket], device: DeviceMemory, links: SharedMemoryReduction
) -> list[torch.Tensor]:
    """What each worker shares, by ring position. NotShareable, on all of them, if one of them cannot."""
    position, hosting = endpoint.position, endpoint.hosting
    place, obstacle, descriptor = "", "", None
    try:
        place = device.place()
    except NotShareable as error:
        obstacle = str(error)
    # Before memory is taken that nobody would read.
    if len(set(_agree(endpoint, links, PLACED, place, obstacle))) > 1:
        raise SeveralDevices("the workers compute on different devices")
    with contextlib.ExitStack() as descriptors:
        try:
            own, descriptor = device.create(size_of(plan, hosting[position]))
            descriptors.callback(os.close, descriptor)
        except (NotShareable, OutOfMemory) as error:
            obstacle = str(error)
        _agree(endpoint, links, CREATED, "", obstacle)
        assert descriptor is not None, "an obstacle would have been told to all"
        pieces = {position: own}
        for peer, given in links.exchange_descriptors(descriptor).items():
            descriptors.callback(os.close, given)
            if not obstacle:
                try:
                    pieces[peer] = device.adopt(given, size_of(plan, hosting[peer]))
                except NotShareable as error:
                    obstacle = str(error)
        _agree(endpoint, links, ADOPTED, "", obstacle)
    return [pieces[place] for place in range(len(hosting))]


def _agree(endpoint: Endpoint, links: SharedMemoryReduction, index: int, word: str, obstacle: str) -> list[str]:
    """Everybody's word. NotShareable, on all of them, if anybody has met an obstacle."""
    told = links.gather(0, index, f"-{obstacle}".encode() if obstacle else f"+{word}".encode())
    words = [payload.decode() for payload in told]
    for member, said in zip(endpoint.generation.members, words, strict=True):
        if said.startswith("-"):
            raise NotShareable(f"{name_of(member.worker)}: {said[1:]}")
    return [said[1:] for said in words]
