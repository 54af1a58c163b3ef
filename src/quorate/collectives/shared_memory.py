"""The all-reduce of workers on one host, who read each other's lanes in shared memory: the sums of the ring.

Chunk c is summed by the worker that hosts lane c, in ring order of lanes, like on the ring; only the terms are read in
their owners' memory, and the sum is written where everybody reads it.
"""

import contextlib
import logging
import mmap
import os
import socket
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from quorate.collectives.endpoint import Endpoint
from quorate.collectives.memory import GradientMemory, buckets_in, layout_of
from quorate.collectives.reduction import PROBES, add_up_in_stretches, probe_neighbours
from quorate.core.errors import FrameError
from quorate.core.generation import Generation, name_of
from quorate.core.spans import BUCKET, GATHER, SpanRecorder
from quorate.lanes.buckets import Bucket
from quorate.lanes.chunks import cut, summation_order
from quorate.wire.link import Deadline
from quorate.wire.reception import connect_local, pass_descriptors, receive_descriptors
from quorate.wire.shared_memory import LONGEST_MESSAGE, Doorbell, Segment

log = logging.getLogger(__name__)

STAGING = 2 * 2**20
"""Bytes that the memory of the total has at least: a state passes through it too, and each piece costs a barrier."""

_LENGTH = struct.Struct("<Q")
_PLACE = struct.Struct("<cqq")
_PIECE = LONGEST_MESSAGE - _PLACE.size - _LENGTH.size


class SharedMemory(GradientMemory):
    """The lanes of all workers of a host, and one total that all of them read.

    Each worker sees the total through a private view: it reads what the others have written there, and what it writes
    itself nobody else sees. So an optimizer that changes gradients in place does no harm to its neighbours, and one
    that does not costs no copy.
    """

    def __init__(
        self,
        plan: Sequence[Bucket],
        hosting: Sequence[range],
        position: int,
        lane_segments: Sequence[Segment],
        total_segment: Segment,
    ) -> None:
        layout = layout_of(plan)
        self.all_lanes: dict[int, tuple[torch.Tensor, ...]] = {}
        contents = [segment.shared() for segment in lane_segments]
        for lanes, content in zip(hosting, contents, strict=True):
            for index, lane in enumerate(lanes):
                self.all_lanes[lane] = buckets_in(content, plan, layout, index * layout.size)
        shared, self._private = total_segment.shared(), total_segment.private()
        self.shared_total = buckets_in(shared, plan, layout, 0)
        # Between two sums anything may be passed through here.
        self.staging = memoryview(shared)
        # What this worker writes its lanes to, and reads their sum from.
        self.regions = (memoryview(contents[position]), self.staging)
        own = {lane: self.all_lanes[lane] for lane in hosting[position]}
        super().__init__(own, buckets_in(self._private, plan, layout, 0), writes_are_slow=True)
        self._versions = [bucket._version for bucket in self.total]

    def forget_own_writes(self, always: bool) -> None:
        """Have the private view show the shared total again. Without `always`, only where torch has written to it."""
        versions = [bucket._version for bucket in self.total]
        if always or versions != self._versions:
            self._versions = versions
            self._private.madvise(mmap.MADV_DONTNEED)


class SharedMemoryReduction:
    """One worker's place among all workers of a generation, which run on one host.

    Doorbells lead to all the others, by ring position. It owns them: any failure closes all, which is how bad news
    spreads. `trusts_versions`: whoever writes to the total between exchanges does so through torch, which counts it. It
    does not overlap: it is as much computing as the backward pass itself, and would take the core from it.
    """

    overlaps = False

    def __init__(
        self,
        generation: Generation,
        worker: int,
        doorbells: Mapping[int, Doorbell],
        memory: SharedMemory,
        deadline: Deadline,
        *,
        trusts_versions: bool,
    ) -> None:
        self._generation = generation
        self._position = generation.position(worker)
        self._lanes = generation.members[self._position].lanes
        self._doorbells = dict(doorbells)
        self.deadline = deadline
        self.memory = memory
        self.spans: SpanRecorder | None = None
        self._trusts_versions = trusts_versions
        # What this worker adds up of each bucket: the lanes of a chunk in their order, and where the sum is written.
        self._sums = [list(self._terms(index)) for index in range(len(memory.shared_total))]

    def all_reduce(self, step: int, index: int, lane_values: Sequence[torch.Tensor], total: torch.Tensor) -> None:  # noqa: ARG002
        """Fill `total` with the sum over all lanes, each addition rounded to its type: the same bits on every worker.

        Lanes and total are bucket `index` of the shared memory, where they are read and written in place.
        """
        if total is not self.memory.total[index]:
            raise ValueError(f"sum {index} is of bucket {index} of the shared memory: give it that total")
        spans = self.spans
        began = 0.0 if spans is None else spans.clock()
        with self.exchange():
            # Everybody's lanes are written, and everybody is done with the total of the step before.
            self.barrier(b"w", step, index)
            self.memory.forget_own_writes(always=not self._trusts_versions)
            for terms, out in self._sums[index]:
                add_up_in_stretches(terms, out)
            # The total is whole, and everybody is done with our lanes.
            self.barrier(b"s", step, index)
        if spans is not None:
            spans.add(BUCKET, began, spans.exchange, bucket=index)

    def gather(self, step: int, index: int, payload: bytes) -> tuple[bytes, ...]:
        spans = self.spans
        began = 0.0 if spans is None else spans.clock()
        with self.exchange():
            payloads = self._exchange_pieces(_PLACE.pack(b"g", step, index), payload)
        if spans is not None:
            spans.add(GATHER, began, spans.phase, gather=index)
        return payloads

    def broadcast(self, step: int, index: int, root: int, buffer: memoryview, receivers: Collection[int]) -> None:
        """Fill the receivers' buffers with the root's, which writes it, piece by piece, where they read it."""
        shared = self.memory.staging
        half = len(shared) // 2
        with self.exchange():
            for piece, start in enumerate(range(0, len(buffer), half)):
                stop = min(start + half, len(buffer))
                # In turn: who writes one half has met everybody since the other was written, so that one was read.
                place = shared[piece % 2 * half :][: stop - start]
                if self._position == root:
                    place[:] = buffer[start:stop]
                self.barrier(b"b", step, index)
                if self._position in receivers and self._position != root:
                    buffer[start:stop] = place
            self.barrier(b"e", step, index)  # all is read: what comes next may write there

    def round_trip(self) -> float | None:
        workers = len(self._generation.members)
        previous, following = (self._position - 1) % workers, (self._position + 1) % workers

        def ask(there: bytes, back: bytes) -> None:
            self._doorbells[following].ring(there, self.deadline)
            if (said := self._doorbells[following].answer(self.deadline)) != back:
                raise self._elsewhere(following, said, back)

        def answer(there: bytes, back: bytes) -> None:
            if (said := self._doorbells[previous].answer(self.deadline)) != there:
                raise self._elsewhere(previous, said, there)
            self._doorbells[previous].ring(back, self.deadline)

        messages = [(_PLACE.pack(b"p", 0, probe), _PLACE.pack(b"q", 0, probe)) for probe in range(PROBES)]
        with self.exchange():
            return probe_neighbours(self._position, messages, ask, answer)

    def bytes_passed(self, elements: int, itemsize: int) -> int:
        """What others read of this worker's lanes, and of the sums that it has formed: with one lane a worker that is
        as much as a ring sends."""
        chunks = cut(elements, self._generation.lanes)
        summed: int = sum(chunks[lane].stop - chunks[lane].start for lane in self._lanes)
        others = len(self._generation.members) - 1
        return (len(self._lanes) * (elements - summed) + summed * others) * itemsize

    def exchange_descriptors(self, descriptor: int) -> dict[int, int]:
        """Give everybody what this descriptor stands for; theirs, by ring position, which the caller closes."""
        given: dict[int, int] = {}
        with self.exchange():
            try:
                for doorbell in self._doorbells.values():
                    doorbell.pass_descriptor(descriptor)
                for position, doorbell in self._doorbells.items():
                    given[position] = doorbell.receive_descriptor(self.deadline)
            except BaseException:
                for received in given.values():
                    os.close(received)
                raise
        return given

    def close(self) -> None:
        for doorbell in self._doorbells.values():
            doorbell.close()

    def _terms(self, index: int) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
        lanes, total = self._generation.lanes, self.memory.shared_total[index]
        chunks = cut(total.numel(), lanes)
        for chunk in self._lanes:
            order = summation_order(chunk, lanes)
            yield [self.memory.all_lanes[lane][index][chunks[chunk]] for lane in order], total[chunks[chunk]]

    def barrier(self, what: bytes, step: int, index: int) -> None:
        """Return when everybody has come here."""
        message = _PLACE.pack(what, step, index)
        for position, said in self._exchange_messages(message).items():
            if said != message:
                raise self._elsewhere(position, said, message)

    def _exchange_pieces(self, place: bytes, payload: bytes) -> tuple[bytes, ...]:
        """In pieces, of which everybody sends one before anybody sends the next: so no buffer can overflow."""
        head = place + _LENGTH.pack(len(payload))
        collected = {position: bytearray() for position in self._doorbells}
        for position, said in self._exchange_messages(head + payload[:_PIECE]).items():
            if said[: len(place)] != place:
                raise self._elsewhere(position, said[: len(place)], place)
            collected[position] += said
        longest = max(len(payload), *(_LENGTH.unpack_from(said, len(place))[0] for said in collected.values()))
        for start in range(_PIECE, longest, _PIECE):
            for position, said in self._exchange_messages(payload[start : start + _PIECE]).items():
                collected[position] += said
        payloads = {position: bytes(said[len(head) :]) for position, said in collected.items()}
        payloads[self._position] = payload
        return tuple(payloads[position] for position in range(len(self._generation.members)))

    def _elsewhere(self, position: int, said: bytes, expected: bytes) -> FrameError:
        return FrameError(
            f"{self._doorbells[position].peer} is elsewhere in the exchange: it sent {_described(said)} where "
            f"{_described(expected)} is expected"
        )

    def _exchange_messages(self, message: bytes) -> dict[int, bytes]:
        for doorbell in self._doorbells.values():
            doorbell.ring(message, self.deadline)
        return {position: doorbell.answer(self.deadline) for position, doorbell in self._doorbells.items()}

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Around all that members do together: who fails closes, and with it all others fail."""
        try:
            yield
        except BaseException:
            self.close()
            raise


def share_memory(
    endpoint: Endpoint, plan: Sequence[Bucket], *, trusts_versions: bool = False
) -> tuple["SharedMemoryReduction", SharedMemory]:
    """Connect the workers of one host."""
    if plan:
        log.info("gradients are summed in shared memory: all %d workers run on this host", len(endpoint.hosting))
    position, hosting, size = endpoint.position, endpoint.hosting, layout_of(plan).size
    total_size = max(size, STAGING)
    with contextlib.ExitStack() as descriptors, contextlib.ExitStack() as on_failure:
        lanes = {position: Segment.create(_size_of(hosting[position], size))}
        descriptors.callback(lanes[position].close)
        total = None
        if position == 0:
            total = Segment.create(total_size)
            descriptors.callback(total.close)
        connections: dict[int, socket.socket] = {}
        for peer, sock in _connections(endpoint):
            connections[peer] = sock
            on_failure.callback(sock.close)
        names = {peer: f"{name_of(endpoint.generation.members[peer].worker)} (this host)" for peer in connections}
        ours = [segment.descriptor for segment in (lanes[position], total) if segment is not None]
        for peer, sock in connections.items():
            pass_descriptors(sock, ours, names[peer])
        for peer, sock in connections.items():
            given = receive_descriptors(sock, 2 if peer == 0 else 1, names[peer], endpoint.deadline)
            lanes[peer] = Segment.adopt(given[0], _size_of(hosting[peer], size))
            descriptors.callback(lanes[peer].close)
            if peer == 0:
                total = Segment.adopt(given[1], total_size)
                descriptors.callback(total.close)
        assert total is not None, "position 0 makes it, and passes it to all others"
        memory = SharedMemory(plan, hosting, position, [lanes[place] for place in range(len(hosting))], total)
        on_failure.pop_all()
    generation = endpoint.generation.id
    doorbells = {peer: Doorbell(sock, names[peer], generation) for peer, sock in sorted(connections.items())}
    worker, lease = endpoint.credentials.worker, endpoint.lease
    return SharedMemoryReduction(
        endpoint.generation, worker, doorbells, memory, lease, trusts_versions=trusts_versions
    ), memory


def _size_of(hosted: range, lane_size: int) -> int:
    """Bytes for these lanes; a segment has some, even if it is a server's, which hosts none."""
    return max(1, len(hosted) * lane_size)


def _connections(endpoint: Endpoint) -> Iterator[tuple[int, socket.socket]]:
    """To everybody, by ring position: a worker connects to those before it, and waits for those behind it."""
    members, position, credentials = endpoint.generation.members, endpoint.position, endpoint.credentials
    for peer, member in enumerate(members[:position]):
        yield peer, connect_local(member.local_address, credentials, member.worker, endpoint.deadline)
    awaited = {member.worker: peer for peer, member in enumerate(members) if peer > position}
    assert endpoint.listeners.local is not None, "whoever has an address of its host listens there"
    for worker, sock in endpoint.listeners.local.accept(credentials, awaited.keys(), endpoint.deadline):
        yield awaited[worker], sock


def _described(message: bytes) -> str:
    if len(message) != _PLACE.size:
        return f"{len(message)} bytes"
    what, step, index = _PLACE.unpack(message)
    return f"'{what.decode(errors='replace')}' of sum {index} at step {step}"
