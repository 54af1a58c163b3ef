"""Compressed gradients from workers to parameter servers, and compressed deltas of values back.

A worker encodes each lane by groups of blocks that have the same holders: each block once, however many servers it is
sent to. Servers sum in the order of the ring, so the sums are those of the compressed ring. Every server answers, also
where it has nothing to tell: a worker that has completed a step knows that all servers have.

Servers answer with deltas, compressed like gradients and with an error feedback of their own: a server knows what
workers have of each block, tells part of the difference between that and its exact values, and what it has not told
stays in the difference. All holders of a block come to the same, so a replica goes on where its primary was.
"""

import struct
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from quorate.collectives.memory import dtype_of
from quorate.core.errors import FrameError
from quorate.core.generation import Member
from quorate.lanes.buckets import Bucket
from quorate.observe.seldom_events import GradientsCompressed
from quorate.replica.flat_gradients import FlatGradients
from quorate.strategies.compression.compressor import Compressor, EncodedLane, Method
from quorate.strategies.compression.residuals import Residuals, encode_lane
from quorate.strategies.servers.exchange import Exchange, Values
from quorate.strategies.servers.links import Spokes
from quorate.strategies.servers.share import Share
from quorate.training.lane import LaneResult
from quorate.wire.link import Tag

PUSH_CHANNEL = 13
ANSWER_CHANNEL = 14

_SIZE = struct.Struct("<Q")
_ROOM = 64 * 2**10
"""Bytes that an encoded message may have besides as much as twice what it encodes."""


class EncodedExchange(Exchange):
    """An `Exchange` over the links of `spokes`.

    `holders` has for each block the positions of the servers that hold it, the primary first; `blocks` are those that
    are exchanged here. What `push` sends is in `lanes`: for each lane its gradient as it was encoded. What `publish`
    sends is `answer`. Values that are pulled must be those that the worker has: they are moved by what the
    servers tell. Without `tells_deltas` these are the values as they are.
    """

    def __init__(
        self,
        spokes: Spokes,
        plan: Sequence[Bucket],
        holders: Sequence[Sequence[int]],
        blocks: Collection[int],
        method: Method,
        *,
        tells_deltas: bool,
    ) -> None:
        lanes = spokes.generation.lanes
        super().__init__(plan, lanes)
        self.spokes = spokes
        self.lanes: Mapping[int, Sequence[EncodedLane]] = {}
        self.answer = b""
        self.bytes_sent = self.bytes_received = 0
        self._before = (0, 0)
        self.tells_deltas = tells_deltas
        self._method = method
        groups: dict[tuple[int, ...], set[int]] = {}
        for index in sorted(blocks):
            groups.setdefault(tuple(holders[index]), set()).add(index)
        self._groups = [(places, Compressor(method, plan, lanes, of)) for places, of in sorted(groups.items())]
        self._led = {at: [block for block in sorted(blocks) if holders[block][0] == at] for at in spokes.servers}
        # What servers tell is encoded like the gradient of a single lane.
        self.answers = {at: self.compressor_of(led) for at, led in self._led.items()} if tells_deltas else {}
        self._received: list[dict[int, EncodedLane]] = []
        self._totals: list[torch.Tensor] = []

    def compressor_of(self, blocks: Collection[int]) -> Compressor:
        """For the deltas of these blocks."""
        return Compressor(self._method, self._plan, 1, blocks)

    def in_plan(self, values: Values) -> list[torch.Tensor]:
        """Memory that is laid out like the plan, with these in it. Only what lies under them is ever touched."""
        if not self._totals:
            self._totals = [torch.empty(bucket.numel, dtype=dtype_of(bucket)) for bucket in self._plan]
        for block, value in values.items():
            self._within(self._totals, block).copy_(value)
        return self._totals

    def encode(
        self, step: int, results: Sequence[LaneResult], gradients: FlatGradients, residuals: Residuals | None
    ) -> None:
        """A worker: encode its lanes' gradients, with what they have held back. What is held back after the step is
        written down when this returns, before anything is sent of it."""
        self._before = (self.bytes_sent, self.bytes_received)
        compressors = [compressor for _, compressor in self._groups]
        self.lanes = {
            each.lane: encode_lane(compressors, residuals, step, each, gradients.lanes[each.lane].buckets)
            for each in results
        }

    def traffic(self, step: int, own: Member) -> GradientsCompressed:
        """What this worker has sent and received in the step that was encoded last."""
        sent, received = self._before
        sizes = [len(part.payload) for lane in self.lanes.values() for part in lane]
        pushed = sum(compressor.dense_bytes * len(places) for places, compressor in self._groups)
        return GradientsCompressed(
            step=step,
            generation=str(self.spokes.generation.id),
            worker=own.worker,
            lane_bytes=round(sum(sizes) / len(own.lanes)),
            lane_bytes_dense=self._dense_bytes,
            sent_bytes=self.bytes_sent - sent,
            received_bytes=self.bytes_received - received,
            sent_bytes_dense=pushed * len(own.lanes),
            received_bytes_dense=self._dense_bytes,
        )

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
                    raise FrameError(f"the encoded gradients of {self.spokes.name(worker)} are cut off")
                (size,) = _SIZE.unpack_from(message, start)
                start += _SIZE.size
                received[lane] = self._groups[number][1].decode(step, lane, message[start : start + size])
                start += size
        if start != len(message):
            raise FrameError(f"{self.spokes.name(worker)} has sent more than the encoded gradients of its lanes")

    def add_up(self, step: int, totals: Values) -> None:  # noqa: ARG002
        summed = self.in_plan({})
        for received, number in zip(self._received, self._held(self.spokes.position), strict=True):
            self._groups[number][1].add_up(received, summed)
        for index, total in totals.items():
            total.copy_(self._within(summed, index))

    def publish(self, step: int, values: Values) -> None:
        answer = self.answer_of(values)
        with self.spokes.exchange():
            for worker in self.spokes.peers:
                self._send(worker, step, ANSWER_CHANNEL, answer)

    def pull(self, step: int, values: Values) -> None:
        with self.spokes.exchange():
            for server in self.spokes.peers:
                self.take_answer(step, server, self._receive(server, step, ANSWER_CHANNEL), values)

    def answer_of(self, values: Values) -> bytes:
        """What this server tells all workers."""
        if self.tells_deltas:
            return self.answer
        led = self._led[self.spokes.position]
        return b"".join(values[block].view(torch.uint8).numpy().tobytes() for block in led)

    def take_answer(self, step: int, server: int, answer: memoryview, values: Values) -> None:
        """The answer of a server, on a worker; a step that changes nothing has none."""
        led = self._led[server]
        if self.tells_deltas:
            if len(answer):
                self.answers[server].decode(step, 0, answer).add_to(values)
            return
        if len(answer) != sum(values[block].nbytes for block in led):
            raise FrameError(
                f"{self.spokes.name(server)} has sent {len(answer)} bytes of values, which is not what it holds"
            )
        start = 0
        for block in led:
            size = values[block].nbytes
            if size:
                content = torch.frombuffer(answer, dtype=torch.uint8, count=size, offset=start)
                values[block].view(torch.uint8).copy_(content)
            start += size

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
            raise FrameError(f"{self.spokes.name(peer)} announces {count} bytes where there are {most} at most")
        content = bytearray(count)
        if count:
            self.spokes.receive(peer, self._tag(step, channel, 1), torch.frombuffer(content, dtype=torch.uint8))
        self.bytes_received += _SIZE.size + count
        return memoryview(content)

    @property
    def _dense_bytes(self) -> int:
        return sum(compressor.dense_bytes for _, compressor in self._groups)

    def _tag(self, step: int, channel: int, number: int) -> Tag:
        return Tag(self.spokes.generation.id, step, channel, number)


class Answers:
    """A server's side: its optimizers update the exact values, and workers are told how far theirs are to move."""

    def __init__(self, share: Share, exchange: EncodedExchange) -> None:
        self._exchange = exchange
        self._share = share
        # Not what is exact here: until the first step is agreed on, more is held than is placed here.
        self._followed = exchange.compressor_of(share.by_deltas & share.placed - set(share.primary))

    def update(self, step: int, update: Callable[[], None]) -> None:
        """Update exact values, and give the parameters the values that workers have after this step."""
        self._swap()
        update()
        self._swap()
        self._exchange.answer = self._tell(step, self._exchange.answers[self._exchange.spokes.position])
        self._tell(step, self._followed)  # to nobody: a replica has the values that workers have

    def _tell(self, step: int, compressor: Compressor) -> bytes:
        share, blocks = self._share, compressor.blocks
        with torch.no_grad():
            moved = self._exchange.in_plan(
                {block: (share.exact[block] - share.parameter(block)).reshape(-1) for block in blocks}
            )
            told = compressor.encode(step, 0, sum(1 << block for block in blocks), moved)
            values = {block: share.parameter(block).detach().reshape(-1) for block in blocks}
            told.add_to(values)
            for block, value in values.items():
                parameter = share.parameter(block)
                if not parameter.is_contiguous():  # then it was a copy that has moved
                    parameter.copy_(value.view(parameter.shape))
        return told.payload

    def _swap(self) -> None:
        """Exact values take the place of the parameters, or the reverse; one block at a time, to spare memory."""
        with torch.no_grad():
            for block, exact in self._share.exact.items():
                parameter = self._share.parameter(block)
                kept = parameter.clone()
                parameter.copy_(exact)
                exact.copy_(kept)
