"""Tensors between workers and parameter servers over links: each worker is linked to each server."""

from collections.abc import Mapping, Sequence

import torch

from quorate.lanes.block_sums import plan_blocks
from quorate.lanes.buckets import Bucket, Slot
from quorate.reduce.memory import dtype_of
from quorate.reduce.reduction import add_up_block
from quorate.strategies.servers.parcels import Parcel, plan_parcels
from quorate.strategies.servers.spokes import Spokes
from quorate.wire.link import Tag

PUSH_CHANNEL = 8
PUBLISH_CHANNEL = 9

Lanes = Mapping[int, Sequence[torch.Tensor]]
"""For each lane its flat tensors, one for each bucket."""


class Star:
    """An `Exchange` over the links of `spokes`, which it closes.

    `holders` has for each block the positions of the servers that hold it, the primary first. `lanes` is the memory of
    a worker's lanes. One thread at a time.
    """

    def __init__(self, spokes: Spokes, plan: Sequence[Bucket], holders: Sequence[Sequence[int]], lanes: Lanes) -> None:
        self.spokes = spokes
        self._plan = plan
        self._blocks = plan_blocks(plan, spokes.generation.lanes)
        self._lanes = lanes
        itemsizes = [dtype_of(bucket).itemsize for bucket in plan]
        concerned = spokes.servers if spokes.is_worker else [spokes.position]
        held = {at: {block for block, places in enumerate(holders) if at in places} for at in concerned}
        led = {at: {block for block, places in enumerate(holders) if places[0] == at} for at in concerned}
        self._pushed = {at: plan_parcels(plan, itemsizes, held[at], lie_in_buckets=True) for at in concerned}
        self._published = {at: plan_parcels(plan, itemsizes, led[at], lie_in_buckets=False) for at in concerned}
        self._collected: dict[int, list[torch.Tensor]] = {}
        self._block_values: dict[int, list[torch.Tensor]] = {}
        if not spokes.is_worker:
            self._make_room(held[spokes.position])
        # One for each bucket, as large as its largest parcel that has to be copied together.
        self._together: dict[int, torch.Tensor] = {}

    @property
    def bytes_sent(self) -> int:
        return self.spokes.bytes_sent

    @property
    def bytes_received(self) -> int:
        return self.spokes.bytes_received

    def room(self, block: int) -> torch.Tensor:
        """Frames of large blocks are sent from everywhere, and received everywhere."""
        place = self._blocks[block]
        return torch.empty(place.slot.numel, dtype=dtype_of(self._plan[place.bucket]))

    def push(self, step: int) -> None:
        with self.spokes.exchange():
            for server in self.spokes.peers:
                for lane, buckets in self._lanes.items():
                    for parcel in self._pushed[server]:
                        bucket, run = buckets[parcel.bucket], parcel.run
                        if run is not None:
                            content = bucket[run]
                        else:
                            content = self._room_for(parcel)
                            torch.cat([bucket[_place(slot)] for slot in parcel.slots], out=content)
                        self.spokes.send(server, self._tag(step, PUSH_CHANNEL, lane, parcel), content)

    def receive(self, step: int) -> None:
        with self.spokes.exchange():
            for worker in self.spokes.peers:
                for lane in self.spokes.generation.members[worker].lanes:
                    for parcel, content in zip(self._pushed[self.spokes.position], self._collected[lane], strict=True):
                        self.spokes.receive(worker, self._tag(step, PUSH_CHANNEL, lane, parcel), content)

    def add_up(self, step: int, totals: Mapping[int, torch.Tensor]) -> None:  # noqa: ARG002
        for block, total in totals.items():
            add_up_block(self._block_values[block], self._blocks[block].pieces, total)

    def publish(self, step: int, values: Mapping[int, torch.Tensor]) -> None:
        parcels = self._published[self.spokes.position]
        parts = [[values[slot.index] for slot in parcel.slots] for parcel in parcels]
        contents = [blocks[0] if len(blocks) == 1 else torch.cat(blocks) for blocks in parts]
        with self.spokes.exchange():
            for worker in self.spokes.peers:
                for parcel, content in zip(parcels, contents, strict=True):
                    self.spokes.send(worker, self._tag(step, PUBLISH_CHANNEL, 0, parcel), content)

    def pull(self, step: int, values: Mapping[int, torch.Tensor]) -> None:
        with self.spokes.exchange():
            for server in self.spokes.peers:
                for parcel in self._published[server]:
                    tag = self._tag(step, PUBLISH_CHANNEL, 0, parcel)
                    parts = [values[slot.index] for slot in parcel.slots]
                    if len(parts) == 1:
                        self.spokes.receive(server, tag, parts[0])
                        continue
                    content = self._room_for(parcel)
                    self.spokes.receive(server, tag, content)
                    for part, came in zip(parts, _split(content, parcel), strict=True):
                        part.copy_(came)

    def close(self) -> None:
        self.spokes.close()

    def _make_room(self, held: set[int]) -> None:
        """For what all lanes send: a frame is received where its blocks are read when they are added up."""
        parcels = self._pushed[self.spokes.position]
        for lane in range(self.spokes.generation.lanes):
            self._collected[lane] = [torch.empty(p.numel, dtype=dtype_of(self._plan[p.bucket])) for p in parcels]
        for block in held:
            empty = torch.empty(0, dtype=dtype_of(self._plan[self._blocks[block].bucket]))
            self._block_values[block] = [empty] * self.spokes.generation.lanes
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
        return Tag(self.spokes.generation.id, step, channel, lane * len(self._blocks) + parcel.first)


def _place(slot: Slot) -> slice:
    return slice(slot.offset, slot.offset + slot.numel)


def _split(content: torch.Tensor, parcel: Parcel) -> tuple[torch.Tensor, ...]:
    return torch.split_with_sizes(content, [slot.numel for slot in parcel.slots])
