"""Workers of one host, who read each other's lanes where they are: the ring's sums, without passing anything on.

Chunk c is summed by the worker that hosts lane c, in ring order of lanes, like on the ring; only the terms are read in
their owners' memory, and the sum is written where everybody reads it.
"""

import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from quorate.core.errors import FrameError
from quorate.core.generation import Generation
from quorate.lanes.chunks import cut
from quorate.lanes.order import summation_order
from quorate.reduce.memory import SharedMemory
from quorate.reduce.tensor_bytes import tensor_bytes
from quorate.wire.doorbell import LONGEST_MESSAGE, Doorbell
from quorate.wire.link import Deadline

BLOCK = 2**15
"""Elements that are summed over all lanes before the next are looked at: they stay in a core's cache meanwhile."""

_LENGTH = struct.Struct("<Q")
_MEETING = struct.Struct("<cqq")
_PIECE = LONGEST_MESSAGE - _MEETING.size - _LENGTH.size


class Pool:
    """One worker's place among all workers of a generation, which run on one host.

    Doorbells lead to all the others, by ring position. It owns them: any failure closes all, which is how bad news
    spreads. `trusts_versions`: whoever writes to the total between exchanges does so through torch, which counts it.
    """

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
        self._deadline = deadline
        self.memory = memory
        self._trusts_versions = trusts_versions

    def all_reduce(self, step: int, index: int, lane_values: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        """Fill `total` with the sum over all lanes, each addition rounded to its type: the same bits on every worker.

        Buckets of the pool's own memory are summed where they are, everything else through its scratch space.
        """
        with self._exchange():
            if index < len(self.memory.total) and total is self.memory.total[index]:
                self._sum_bucket(step, index)
            else:
                self._sum_aside(step, index, lane_values, total)

    @property
    def overlaps(self) -> bool:
        """It is as much computing as the backward pass itself, and would take the core from it."""
        return False

    def gather(self, step: int, index: int, payload: bytes) -> tuple[bytes, ...]:
        """Everyone's payload, in the order of ring positions."""
        with self._exchange():
            return self._gather(_MEETING.pack(b"g", step, index), payload)

    def broadcast(self, step: int, index: int, root: int, buffer: memoryview, receivers: Collection[int]) -> None:
        """Fill the receivers' buffers with the root's, which writes it, piece by piece, where they read it."""
        shared = tensor_bytes(self.memory.total_scratch)
        half = len(shared) // 2
        with self._exchange():
            for piece, start in enumerate(range(0, len(buffer), half)):
                stop = min(start + half, len(buffer))
                # In turn: who writes one half has met everybody since the other was written, so that one was read.
                place = shared[piece % 2 * half :][: stop - start]
                if self._position == root:
                    place[:] = buffer[start:stop]
                self._meet(b"b", step, index)
                if self._position in receivers and self._position != root:
                    buffer[start:stop] = place
            self._meet(b"e", step, index)  # all is read: what comes next may write there

    def close(self) -> None:
        """Close all doorbells. Any thread may call it, any number of times."""
        for doorbell in self._doorbells.values():
            doorbell.close()

    def _sum_bucket(self, step: int, index: int) -> None:
        lanes = {lane: buckets[index] for lane, buckets in self.memory.all_lanes.items()}
        total = self.memory.shared_total[index]
        chunks = cut(total.numel(), self._generation.lanes)
        # Everybody's lanes are written, and everybody is done with the total of the step before.
        self._meet(b"w", step, index)
        self.memory.forget_own_writes(always=not self._trusts_versions)
        for chunk in self._lanes:
            self._sum(chunk, chunks[chunk], lanes, total)
        # The total is whole, and everybody is done with our lanes.
        self._meet(b"s", step, index)

    def _sum_aside(self, step: int, index: int, lane_values: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        itemsize, dtype = total.itemsize, total.dtype
        chunks = cut(total.numel(), self._generation.lanes)
        room = self.memory.total_scratch.numel() // itemsize
        lanes = {lane: scratch[: room * itemsize].view(dtype) for lane, scratch in self.memory.scratch.items()}
        shared = self.memory.total_scratch[: room * itemsize].view(dtype)
        for start in range(0, total.numel(), room):
            stop = min(start + room, total.numel())
            for lane, value in zip(self._lanes, lane_values, strict=True):
                lanes[lane][: stop - start].copy_(value[start:stop])
            self._meet(b"w", step, index)
            for chunk in self._lanes:
                first, last = max(chunks[chunk].start, start), min(chunks[chunk].stop, stop)
                if first < last:
                    self._sum(chunk, slice(first - start, last - start), lanes, shared)
            self._meet(b"s", step, index)
            # Before anybody writes there again, everybody has come to the next meeting, and so has copied this out.
            total[start:stop].copy_(shared[: stop - start])

    def _sum(self, chunk: int, place: slice, lanes: Mapping[int, torch.Tensor], total: torch.Tensor) -> None:
        first, *rest = (lanes[lane][place] for lane in summation_order(chunk, self._generation.lanes))
        out = total[place]
        if len(rest) <= 1:
            _add_up(first, rest, out)
            return
        for start in range(0, out.numel(), BLOCK):
            block = slice(start, start + BLOCK)
            _add_up(first[block], [term[block] for term in rest], out[block])

    def _meet(self, what: bytes, step: int, index: int) -> None:
        """Go on when everybody is here."""
        message = _MEETING.pack(what, step, index)
        for position, said in self._tell_and_hear(message).items():
            self._check(position, said, message)

    def _gather(self, place: bytes, payload: bytes) -> tuple[bytes, ...]:
        """In pieces, of which everybody sends one before anybody sends the next: so no buffer can overflow."""
        head = place + _LENGTH.pack(len(payload))
        collected = {position: bytearray() for position in self._doorbells}
        for position, said in self._tell_and_hear(head + payload[:_PIECE]).items():
            self._check(position, said[: len(place)], place)
            collected[position] += said
        longest = max(len(payload), *(_LENGTH.unpack_from(said, len(place))[0] for said in collected.values()))
        for start in range(_PIECE, longest, _PIECE):
            for position, said in self._tell_and_hear(payload[start : start + _PIECE]).items():
                collected[position] += said
        payloads = {position: bytes(said[len(head) :]) for position, said in collected.items()}
        payloads[self._position] = payload
        return tuple(payloads[position] for position in range(len(self._generation.members)))

    def _check(self, position: int, said: bytes, expected: bytes) -> None:
        if said != expected:
            raise FrameError(
                f"{self._doorbells[position].peer} is elsewhere in the exchange: it says {_told(said)} where "
                f"{_told(expected)} is expected"
            )

    def _tell_and_hear(self, message: bytes) -> dict[int, bytes]:
        for doorbell in self._doorbells.values():
            doorbell.ring(message, self._deadline)
        return {position: doorbell.answer(self._deadline) for position, doorbell in self._doorbells.items()}

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise


def _add_up(first: torch.Tensor, rest: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Lane after lane, each addition rounded. Never from zeros: 0.0 + -0.0 is 0.0, and the sign is part of the bits."""
    if not rest:
        out.copy_(first)
        return
    torch.add(first, rest[0], out=out)
    for term in rest[1:]:
        out.add_(term)


def _told(message: bytes) -> str:
    if len(message) != _MEETING.size:
        return f"{len(message)} bytes"
    what, step, index = _MEETING.unpack(message)
    return f"'{what.decode(errors='replace')}' of sum {index} at step {step}"
