"""Tensors between workers and parameter servers over links: each worker is linked to each server."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from quorate.core.generation import Generation, Role
from quorate.lanes.block_sums import plan_blocks
from quorate.lanes.buckets import Bucket, Slot
from quorate.lanes.parcels import Parcel, meetings, plan_parcels
from quorate.reduce.memory import dtype_of
from quorate.reduce.reduction import add_up_block
from quorate.reduce.ring import Blame, unchanged
from quorate.wire.link import Deadline, Link, Tag

PUSH_CHANNEL = 8
PUBLISH_CHANNEL = 9

Lanes = Mapping[int, Sequence[torch.Tensor]]
"""For each lane its flat tensors, one for each bucket."""


class Star:
    """An `Exchange` over links, which lead from a worker to all servers, or from a server to all workers, by position.

    It owns the links of these peers: any failure closes all, which is how bad news spreads. `holders` has for each
    block the positions of the servers that hold it, the primary first. `lanes` is the memory of a worker's lanes.
    One thread at a time; sends and receives meet in an order that leans on no buffer.
    """

    def __init__(
        self,
        generation: Generation,
        worker: int,
        links: Mapping[int, Link],
        plan: Sequence[Bucket],
        holders: Sequence[Sequence[int]],
        lanes: Lanes,
        deadline: Deadline,
        blame: Blame = unchanged,
    ) -> None:
        position = generation.position(worker)
        workers = [place for place, member in enumerate(generation.members) if member.role is Role.WORKER]
        servers = [place for place in range(len(generation.members)) if place not in workers]
        if position in workers:
            met = meetings(len(workers), len(servers), worker=workers.index(position))
            self._peers = [servers[server] for server in met]
        else:
            met = meetings(len(workers), len(servers), server=servers.index(position))
            self._peers = [workers[met_worker] for met_worker in met]
        self._generation = generation
        self._links = {peer: links[peer] for peer in self._peers}
        self._plan = plan
        self._blocks = plan_blocks(plan, generation.lanes)
        self._deadline = deadline
        self._blame = blame
        self.bytes_sent = self.bytes_received = 0
        itemsizes = [dtype_of(bucket).itemsize for bucket in plan]
        concerned = servers if position in workers else [position]
        held = {at: {block for block, places in enumerate(holders) if at in places} for at in concerned}
        led = {at: {block for block, places in enumerate(holders) if places[0] == at} for at in concerned}
        self._pushed = {at: plan_parcels(plan, itemsizes, held[at], lie_in_buckets=True) for at in concerned}
        self._published = {at: plan_parcels(plan, itemsizes, led[at], lie_in_buckets=False) for at in concerned}
        self._position = position
        self._lanes = lanes
        self._collected: dict[int, list[torch.Tensor]] = {}
        self._block_values: dict[int, list[torch.Tensor]] = {}
        if position not in workers:
            self._make_room(held[position])
        # One for each bucket, as large as its largest parcel that has to be copied together.
        self._together: dict[int, torch.Tensor] = {}

    def push(self, step: int) -> None:
        with self._exchange():
            for server in self._peers:
                for lane, buckets in self._lanes.items():
                    for parcel in self._pushed[server]:
                        bucket, run = buckets[parcel.bucket], parcel.run
                        if run is not None:
                            content = bucket[run]
                        else:
                            content = self._room_for(parcel)
                            torch.cat([bucket[_place(slot)] for slot in parcel.slots], out=content)
                        self._send(server, self._tag(step, PUSH_CHANNEL, lane, parcel), content)

    def receive(self, step: int) -> None:
        with self._exchange():
            for worker in self._peers:
                for lane in self._generation.members[worker].lanes:
                    for parcel, content in zip(self._pushed[self._position], self._collected[lane], strict=True):
                        self._receive(worker, self._tag(step, PUSH_CHANNEL, lane, parcel), content)

    def add_up(self, step: int, totals: Mapping[int, torch.Tensor]) -> None:  # noqa: ARG002
        for block, total in totals.items():
            add_up_block(self._block_values[block], self._blocks[block].pieces, total)

    def publish(self, step: int, values: Mapping[int, torch.Tensor]) -> None:
        parcels = self._published[self._position]
        parts = [[values[slot.index] for slot in parcel.slots] for parcel in parcels]
        contents = [blocks[0] if len(blocks) == 1 else torch.cat(blocks) for blocks in parts]
        with self._exchange():
            for worker in self._peers:
                for parcel, content in zip(parcels, contents, strict=True):
                    self._send(worker, self._tag(step, PUBLISH_CHANNEL, 0, parcel), content)

    def pull(self, step: int, values: Mapping[int, torch.Tensor]) -> None:
        with self._exchange():
            for server in self._peers:
                for parcel in self._published[server]:
                    tag = self._tag(step, PUBLISH_CHANNEL, 0, parcel)
                    parts = [values[slot.index] for slot in parcel.slots]
                    if len(parts) == 1:
                        self._receive(server, tag, parts[0])
                        continue
                    content = self._room_for(parcel)
                    self._receive(server, tag, content)
                    for part, came in zip(parts, _split(content, parcel), strict=True):
                        part.copy_(came)

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def _make_room(self, held: set[int]) -> None:
        """For what all lanes send: a frame is received where its blocks are read when they are added up."""
        parcels = self._pushed[self._position]
        for lane in range(self._generation.lanes):
            self._collected[lane] = [torch.empty(p.numel, dtype=dtype_of(self._plan[p.bucket])) for p in parcels]
        for block in held:
            empty = torch.empty(0, dtype=dtype_of(self._plan[self._blocks[block].bucket]))
            self._block_values[block] = [empty] * self._generation.lanes
        for lane, contents in self._collected.items():
            for parcel, content in zip(parcels, contents, strict=True):
                for slot, part in zip(parcel.slots, _split(content, parcel), strict=True):
                    self._block_values[slot.index][lane] = part

    def _room_for(self, parcel: Parcel) -> torch.Tensor:
        room = self._together.get(parcel.bucket)
        if room is None or room.numel() < parcel.numel:
            room = torch.empty(parcel.numel, dtype=dtype_of(self._plan[parcel.bucket]))
            self._together[parcel.bucket] = room
        return room[: parcel.numel]

    def _tag(self, step: int, channel: int, lane: int, parcel: Parcel) -> Tag:
        """Unlike for every lane and parcel: what is early, late or placed elsewhere is refused, not added."""
        return Tag(self._generation.id, step, channel, lane * len(self._blocks) + parcel.first)

    def _send(self, peer: int, tag: Tag, content: torch.Tensor) -> None:
        payload = _bytes(content)
        self._links[peer].send(tag, payload, self._deadline)
        self.bytes_sent += len(payload)

    def _receive(self, peer: int, tag: Tag, content: torch.Tensor) -> None:
        payload = _bytes(content)
        self._links[peer].receive_into(tag, payload, self._deadline)
        self.bytes_received += len(payload)

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            reason = self._blame(error)
            self.close()
            if reason is error:
                raise
            raise reason from None


def _place(slot: Slot) -> slice:
    return slice(slot.offset, slot.offset + slot.numel)


def _split(content: torch.Tensor, parcel: Parcel) -> tuple[torch.Tensor, ...]:
    return torch.split_with_sizes(content, [slot.numel for slot in parcel.slots])


def _bytes(content: torch.Tensor) -> memoryview:
    if content.dim() != 1 or not content.is_contiguous() or content.device.type != "cpu":
        shape = f"shape {tuple(content.shape)}, strides {content.stride()} on {content.device}"
        raise ValueError(f"a tensor has {shape}: servers are sent flat, contiguous tensors in CPU memory")
    view: memoryview = content.detach().view(torch.uint8).numpy().data  # as bytes first: bfloat16 has no NumPy type
    return view
