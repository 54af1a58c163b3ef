"""Encoded gradients from workers to parameter servers, and encoded deltas of values back.

A worker encodes each lane by groups of blocks that have the same holders: each block once, however many servers it is
sent to. Servers sum in the order of the ring, so the sums are those of the compressed ring. Every server answers, also
where it has nothing to tell: a worker that has completed a step knows that all servers have.
"""

import struct
from collections.abc import Collection, Mapping, Sequence

import torch

from quorate.core.errors import FrameError
from quorate.core.generation import name_of
from quorate.lanes.block_sums import plan_blocks
from quorate.lanes.buckets import Bucket
from quorate.reduce.memory import dtype_of
from quorate.strategies.compression.compressor import Compressor, EncodedLane, Method
from quorate.strategies.compression.deltas import Deltas
from quorate.strategies.servers.spokes import Spokes
from quorate.wire.link import Tag

PUSH_CHANNEL = 13
ANSWER_CHANNEL = 14

_SIZE = struct.Struct("<Q")
_ROOM = 64 * 2**10
"""Bytes that an encoded message may have besides as much as twice what it encodes."""


class EncodedExchange:
    """An `Exchange` over the links of `spokes`, which it closes.

    `holders` has for each block the positions of the servers that hold it, the primary first; `blocks` are those that
    are exchanged here. What `push` sends is in
    `lanes`: for each lane its gradient as `compressors` encode it. What `publish` sends is `answer`. Values that are
    pulled must be those that the worker has: they are moved by what the servers tell. `deltas` says how; without it,
    servers answer with values as they are.
    """

    def __init__(
        self,
        spokes: Spokes,
        plan: Sequence[Bucket],
        holders: Sequence[Sequence[int]],
        blocks: Collection[int],
        method: Method,
        deltas: Deltas | None,
    ) -> None:
        lanes = spokes.generation.lanes
        self.spokes = spokes
        self.lanes: Mapping[int, Sequence[EncodedLane]] = {}
        self.answer = b""
        self.bytes_sent = self.bytes_received = 0
        self._plan = plan
        self._blocks = {block.index: block for block in plan_blocks(plan, lanes) if block.index in blocks}
        self._deltas = deltas
        groups: dict[tuple[int, ...], set[int]] = {}
        for index in self._blocks:
            groups.setdefault(tuple(holders[index]), set()).add(index)
        self._groups = [(places, Compressor(method, plan, lanes, of)) for places, of in sorted(groups.items())]
        self._led = {at: sorted(block for block in self._blocks if holders[block][0] == at) for at in spokes.servers}
        self._received: list[dict[int, EncodedLane]] = []
        self._totals: list[torch.Tensor] = []

    @property
    def compressors(self) -> list[Compressor]:
        """What a worker encodes its lanes with: each block is encoded by one of them."""
        return [compressor for _, compressor in self._groups]

    @property
    def pushed_dense(self) -> int:
        """The bytes that one lane would send as it is."""
        return sum(compressor.dense_bytes * len(places) for places, compressor in self._groups)

    def push(self, step: int) -> None:
        with self.spokes.exchange():
            for server in self.spokes.peers:
                self._send(server, step, PUSH_CHANNEL, self.message_to(server))

    def receive(self, step: int) -> None:
        self.answer = b""
        self._received = [{} for _ in self._held(self.spokes.position)]
        with self.spokes.exchange():
            for worker in self.spokes.peers:
                self.take_lanes(step, worker, self._receive(worker, step, PUSH_CHANNEL))

    def message_to(self, server: int) -> bytes:
        """What all lanes of this worker have for a server."""
        pieces = [self.lanes[lane][number].payload for lane in sorted(self.lanes) for number in self._held(server)]
        return b"".join(part for piece in pieces for part in (_SIZE.pack(len(piece)), piece))

    def take_lanes(self, step: int, worker: int, message: memoryview) -> None:
        """The message of a worker, on a server."""
        start = 0
        for lane in self.spokes.generation.members[worker].lanes:
            for received, number in zip(self._received, self._held(self.spokes.position), strict=True):
                if len(message) < start + _SIZE.size:
                    raise FrameError(f"the encoded gradients of {self._name(worker)} are cut off")
                (size,) = _SIZE.unpack_from(message, start)
                start += _SIZE.size
                received[lane] = self._groups[number][1].decode(step, lane, message[start : start + size])
                start += size
        if start != len(message):
            raise FrameError(f"{self._name(worker)} has sent more than the encoded gradients of its lanes")

    def add_up(self, step: int, totals: Mapping[int, torch.Tensor]) -> None:  # noqa: ARG002
        if not self._totals:
            # Laid out like the plan. Only what lies under blocks that are held here is ever touched.
            self._totals = [torch.empty(bucket.numel, dtype=dtype_of(bucket)) for bucket in self._plan]
        for received, number in zip(self._received, self._held(self.spokes.position), strict=True):
            self._groups[number][1].add_up(received, self._totals)
        for index, total in totals.items():
            block = self._blocks[index]
            total.copy_(self._totals[block.bucket][block.slot.offset : block.slot.offset + block.slot.numel])

    def publish(self, step: int, values: Mapping[int, torch.Tensor]) -> None:
        answer = self.answer_of(values)
        with self.spokes.exchange():
            for worker in self.spokes.peers:
                self._send(worker, step, ANSWER_CHANNEL, answer)

    def pull(self, step: int, values: Mapping[int, torch.Tensor]) -> None:
        with self.spokes.exchange():
            for server in self.spokes.peers:
                self.take_answer(step, server, self._receive(server, step, ANSWER_CHANNEL), values)

    def room(self, block: int) -> torch.Tensor:
        of = self._blocks[block]
        return torch.empty(of.slot.numel, dtype=dtype_of(self._plan[of.bucket]))

    def answer_of(self, values: Mapping[int, torch.Tensor]) -> bytes:
        """What this server tells all workers."""
        if self._deltas is not None:
            return self.answer
        led = self._led[self.spokes.position]
        return b"".join(values[block].view(torch.uint8).numpy().tobytes() for block in led)

    def take_answer(self, step: int, server: int, answer: memoryview, values: Mapping[int, torch.Tensor]) -> None:
        """The answer of a server, on a worker; a step that changes nothing has none."""
        led = self._led[server]
        if self._deltas is not None:
            if len(answer):
                self._deltas.decode(step, led, answer).add_to(values)
            return
        if len(answer) != sum(values[block].nbytes for block in led):
            raise FrameError(f"{self._name(server)} has sent {len(answer)} bytes of values, which is not what it holds")
        start = 0
        for block in led:
            size = values[block].nbytes
            if size:
                content = torch.frombuffer(answer, dtype=torch.uint8, count=size, offset=start)
                values[block].view(torch.uint8).copy_(content)
            start += size

    def close(self) -> None:
        self.spokes.close()

    def _held(self, server: int) -> list[int]:
        """The groups of which a server has a copy."""
        return [number for number, (places, _) in enumerate(self._groups) if server in places]

    def _send(self, peer: int, step: int, channel: int, message: bytes) -> None:
        """Its size goes before it: it is another in every step."""
        self.spokes.send(peer, self._tag(step, channel, 0), torch.tensor([len(message)]))
        if message:
            self.spokes.send(peer, self._tag(step, channel, 1), torch.frombuffer(bytearray(message), dtype=torch.uint8))
        self.bytes_sent += _SIZE.size + len(message)

    def _receive(self, peer: int, step: int, channel: int) -> memoryview:
        size = torch.empty(1, dtype=torch.int64)
        self.spokes.receive(peer, self._tag(step, channel, 0), size)
        count, most = int(size), 2 * self.spokes.generation.lanes * self._dense_bytes + _ROOM
        if not 0 <= count <= most:
            raise FrameError(f"{self._name(peer)} announces {count} bytes where there are {most} at most")
        content = bytearray(count)
        if count:
            self.spokes.receive(peer, self._tag(step, channel, 1), torch.frombuffer(content, dtype=torch.uint8))
        self.bytes_received += _SIZE.size + count
        return memoryview(content)

    @property
    def _dense_bytes(self) -> int:
        return sum(compressor.dense_bytes for compressor in self.compressors)

    def _name(self, position: int) -> str:
        return name_of(self.spokes.generation.members[position].worker)

    def _tag(self, step: int, channel: int, number: int) -> Tag:
        return Tag(self.spokes.generation.id, step, channel, number)
