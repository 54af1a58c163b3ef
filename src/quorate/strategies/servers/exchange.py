"""How gradients get from workers to parameter servers, and new values back.

What travels in one frame is a parcel. Both ends compute the same parcels from the plan and the placement, so a frame
needs no table of contents.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from quorate.collectives.block_sums import add_up_block, plan_blocks
from quorate.collectives.memory import DeviceMemory, GradientMemory, dtype_of
from quorate.collectives.shared_memory import SharedMemoryReduction
from quorate.core.generation import Generation, GenerationId
from quorate.cuda.reduction import pinned_totals
from quorate.lanes.buckets import Bucket, Slot
from quorate.strategies.servers.links import Spokes, as_bytes
from quorate.wire.link import Deadline, Link, Tag

PUSH_CHANNEL = 8
PUBLISH_CHANNEL = 9
PUBLISHED_INDEX = 9
"""Tells the gather after which new values may be read in shared memory."""

Values = Mapping[int, torch.Tensor]
"""Flat tensors by block."""
Lanes = Mapping[int, Sequence[torch.Tensor]]
"""For each lane its flat tensors, one for each bucket."""


ALONE = 2**18
"""Bytes that are worth a frame of their own. What is smaller is copied together first: a frame costs more than that."""


@dataclass(frozen=True)
class Parcel:
    """Tensors of one bucket, in the order of their bytes in the frame. None of them is empty."""

    bucket: int
    slots: tuple[Slot, ...]

    @property
    def numel(self) -> int:
        return sum(slot.numel for slot in self.slots)

    @property
    def first(self) -> int:
        """The index of its first tensor, which no other parcel has."""
        return self.slots[0].index

    @property
    def run(self) -> slice | None:
        """Its elements in the bucket, where they lie there one behind the other: such a parcel needs no copy."""
        start, end = self.slots[0].offset, self.slots[0].offset
        for slot in self.slots:
            if slot.offset != end:
                return None
            end += slot.numel
        return slice(start, end)


class Packing:
    """Copies tensors of one type together for a frame, and apart again, in memory that is used anew each time."""

    def __init__(self) -> None:
        self._room: dict[torch.dtype, torch.Tensor] = {}

    def packed(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """One behind the other, until the next call; a single one as it is."""
        return parts[0] if len(parts) == 1 else torch.cat(list(parts), out=self._room_for(parts))

    @contextmanager
    def unpacked(self, parts: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Where to receive what belongs to these."""
        if len(parts) == 1:
            yield parts[0]
            return
        content = self._room_for(parts)
        yield content
        for part, came in zip(parts, torch.split_with_sizes(content, [each.numel() for each in parts]), strict=True):
            part.copy_(came)

    def _room_for(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        dtype, size = parts[0].dtype, sum(part.numel() for part in parts)
        if dtype not in self._room or self._room[dtype].numel() < size:
            self._room[dtype] = torch.empty(size, dtype=dtype)
        return self._room[dtype][:size]


def plan_parcels(
    plan: Sequence[Bucket], itemsizes: Sequence[int], chosen: Collection[int], *, lie_in_buckets: bool
) -> tuple[Parcel, ...]:
    """The chosen tensors in few frames: large ones by themselves, the small ones of a bucket together.

    `lie_in_buckets`: neighbours in a bucket are neighbours in memory too, and are taken for one large tensor.
    """
    parcels: list[Parcel] = []
    for number, (bucket, itemsize) in enumerate(zip(plan, itemsizes, strict=True)):
        runs: list[list[Slot]] = []
        end = -1
        for slot in bucket.slots:
            if slot.index not in chosen or not slot.numel:
                continue
            if lie_in_buckets and slot.offset == end:
                runs[-1].append(slot)
            else:
                runs.append([slot])
            end = slot.offset + slot.numel
        small: list[Slot] = []
        for run in runs:
            if sum(slot.numel for slot in run) * itemsize >= ALONE:
                parcels.append(Parcel(number, tuple(run)))
            else:
                small += run
        if small:
            parcels.append(Parcel(number, tuple(small)))
    return tuple(parcels)


class Exchange:
    """One member's end of the exchange of tensors in a generation. Any failure closes its links, which others own.

    A *block* is a trainable parameter, by its index in `plan`. All tensors are flat. In a step a worker pushes and
    pulls, a server receives, adds up and publishes, in this order; in between, members agree by gathers of their
    `Reduction`.
    """

    def __init__(self, plan: Sequence[Bucket], lanes: int) -> None:
        self._plan = plan
        self._blocks = plan_blocks(plan, lanes)

    def room(self, block: int) -> torch.Tensor:
        """Memory for a block's values: what is published from there, or pulled into there, need not be copied.

        A worker may read it from the pull on until its next push.
        """
        of = self._blocks[block]
        return torch.empty(of.slot.numel, dtype=dtype_of(self._plan[of.bucket]))

    def push(self, step: int) -> None:
        """A worker: send what its lanes have collected to every server that holds it.

        The lanes' memory must not change before the step is agreed upon: it may be read in place.
        """
        raise NotImplementedError

    def receive(self, step: int) -> None:
        """A server: have the gradients that all lanes have of the blocks which it holds."""
        raise NotImplementedError

    def add_up(self, step: int, totals: Values) -> None:
        """A server: fill the totals of blocks that it holds with the sum over all lanes: the bits of the ring."""
        raise NotImplementedError

    def publish(self, step: int, values: Values) -> None:
        """A server: send the new values of the blocks of which it is the primary to all workers."""
        raise NotImplementedError

    def pull(self, step: int, values: Values) -> None:
        """A worker: fill the values of all blocks with those that the servers publish."""
        raise NotImplementedError

    def _within(self, buckets: Sequence[torch.Tensor], block: int) -> torch.Tensor:
        """A block in tensors that are laid out like the plan."""
        of = self._blocks[block]
        return buckets[of.bucket][of.slot.place]


class Star(Exchange):
    """Over the links of `spokes`: each worker is linked to each server.

    `holders` has for each block the positions of the servers that hold it, the primary first. `lanes` is the memory of
    a worker's lanes. One thread at a time.
    """

    def __init__(self, spokes: Spokes, plan: Sequence[Bucket], holders: Sequence[Sequence[int]], lanes: Lanes) -> None:
        super().__init__(plan, spokes.generation.lanes)
        self.spokes = spokes
        self._lanes = lanes
        itemsizes = [dtype_of(bucket).itemsize for bucket in plan]
        concerned = spokes.servers if spokes.is_worker else [spokes.position]
        held = {at: {block for block, places in enumerate(holders) if at in places} for at in concerned}
        led = {at: {block for block, places in enumerate(holders) if places[0] == at} for at in concerned}
        self._pushed = {at: plan_parcels(plan, itemsizes, held[at], lie_in_buckets=True) for at in concerned}
        self._published = {at: plan_parcels(plan, itemsizes, led[at], lie_in_buckets=False) for at in concerned}
        self._packing = Packing()
        # Of what all lanes send: a frame is received where its blocks are read when they are added up.
        self._collected: dict[int, list[torch.Tensor]] = {}
        self._block_values: dict[int, list[torch.Tensor]] = {}
        if not spokes.is_worker:
            self._make_room(held[spokes.position])

    def push(self, step: int) -> None:
        with self.spokes.exchange():
            for server in self.spokes.peers:
                for lane, buckets in self._lanes.items():
                    for parcel in self._pushed[server]:
                        bucket, run = buckets[parcel.bucket], parcel.run
                        parts = [bucket[slot.place] for slot in parcel.slots] if run is None else [bucket[run]]
                        tag = self._tag(step, PUSH_CHANNEL, lane, parcel)
                        self.spokes.send(server, tag, self._packing.packed(parts))

    def receive(self, step: int) -> None:
        with self.spokes.exchange():
            for worker in self.spokes.peers:
                for lane in self.spokes.generation.members[worker].lanes:
                    for parcel, content in zip(self._pushed[self.spokes.position], self._collected[lane], strict=True):
                        self.spokes.receive(worker, self._tag(step, PUSH_CHANNEL, lane, parcel), content)

    def add_up(self, step: int, totals: Values) -> None:  # noqa: ARG002
        for block, total in totals.items():
            add_up_block(self._block_values[block], self._blocks[block].pieces, total)

    def publish(self, step: int, values: Values) -> None:
        parcels = self._published[self.spokes.position]
        parts = [[values[slot.index] for slot in parcel.slots] for parcel in parcels]
        contents = [blocks[0] if len(blocks) == 1 else torch.cat(blocks) for blocks in parts]
        with self.spokes.exchange():
            for worker in self.spokes.peers:
                for parcel, content in zip(parcels, contents, strict=True):
                    self.spokes.send(worker, self._tag(step, PUBLISH_CHANNEL, 0, parcel), content)

    def pull(self, step: int, values: Values) -> None:
        with self.spokes.exchange():
            for server in self.spokes.peers:
                for parcel in self._published[server]:
                    with self._packing.unpacked([values[slot.index] for slot in parcel.slots]) as content:
                        self.spokes.receive(server, self._tag(step, PUBLISH_CHANNEL, 0, parcel), content)

    def _make_room(self, held: set[int]) -> None:
        parcels, lanes = self._pushed[self.spokes.position], self.spokes.generation.lanes
        for block in held:
            self._block_values[block] = [self.room(block)[:0]] * lanes  # an empty one comes in no parcel
        for lane in range(lanes):
            self._collected[lane] = [torch.empty(p.numel, dtype=dtype_of(self._plan[p.bucket])) for p in parcels]
            for parcel, content in zip(parcels, self._collected[lane], strict=True):
                sizes = [slot.numel for slot in parcel.slots]
                for slot, part in zip(parcel.slots, torch.split_with_sizes(content, sizes), strict=True):
                    self._block_values[slot.index][lane] = part

    def _tag(self, step: int, channel: int, lane: int, parcel: Parcel) -> Tag:
        """Unlike for every lane and parcel: what is early, late or placed elsewhere is refused, not added."""
        return Tag(self.spokes.generation.id, step, channel, lane * len(self._blocks) + parcel.first)


class SharedExchange(Exchange):
    """On one host: servers read the lanes of all workers, and workers the values that servers have written.

    What a step has written is read before the next begins: members meet in the gathers of the `reduction` in between.
    """

    def __init__(self, generation: Generation, reduction: SharedMemoryReduction, plan: Sequence[Bucket]) -> None:
        super().__init__(plan, generation.lanes)
        self._reduction = reduction
        self._lanes = [reduction.memory.all_lanes[lane] for lane in range(generation.lanes)]

    def room(self, block: int) -> torch.Tensor:
        """Where all members see it."""
        return self._within(self._reduction.memory.shared_total, block)

    def push(self, step: int) -> None:
        """Nothing moves: servers read the lanes once all members have met."""

    def receive(self, step: int) -> None:
        """The lanes are where they are."""

    def add_up(self, step: int, totals: Values) -> None:  # noqa: ARG002
        for block, total in totals.items():
            add_up_block([self._within(lane, block) for lane in self._lanes], self._blocks[block].pieces, total)

    def publish(self, step: int, values: Values) -> None:
        for block, value in values.items():
            _copy(value, self.room(block))
        self._reduction.gather(step, PUBLISHED_INDEX, b"")

    def pull(self, step: int, values: Values) -> None:
        self._reduction.gather(step, PUBLISHED_INDEX, b"")
        for block, value in values.items():
            _copy(self.room(block), value)


class StagedExchange(Exchange):
    """Of tensors on a device, by another exchange of tensors in the memory of the `host`.

    `there` are the lanes of a worker on its device, and the total; a server has none. Servers add up on the host, where
    additions are rounded as they are there. What an optimizer makes of the sums may not be: that is the device's part.
    """

    def __init__(
        self,
        exchange: Exchange,
        plan: Sequence[Bucket],
        host: GradientMemory,
        there: GradientMemory,
        device: DeviceMemory,
    ) -> None:
        super().__init__(plan, 1)
        self._exchange = exchange
        self._host = host
        self._there = there
        self._device = device
        self._totals = pinned_totals(self, host, device)
        self._sums: dict[int, torch.Tensor] = {}

    def room(self, block: int) -> torch.Tensor:
        """On a worker's device, where the sum over lanes would be: with servers it has no other use there."""
        return self._within(self._there.total, block)

    def push(self, step: int) -> None:
        for lane, buckets in self._there.lanes.items():
            for staged, bucket in zip(self._host.lanes[lane], buckets, strict=True):
                staged.copy_(bucket, non_blocking=True)
        self._device.wait()
        self._exchange.push(step)

    def receive(self, step: int) -> None:
        self._exchange.receive(step)

    def add_up(self, step: int, totals: Values) -> None:
        for block in totals.keys() - self._sums.keys():
            # Not in the shared total: there another server has the same block, and tells its values.
            self._sums[block] = self._device.zeros_on_host(totals[block].numel(), totals[block].dtype)
        sums = {block: self._sums[block] for block in totals}
        self._exchange.add_up(step, sums)
        for block, total in totals.items():
            # Nobody waits: before the next sums are written here, new values have been published, and waited for.
            total.copy_(sums[block], non_blocking=True)

    def publish(self, step: int, values: Values) -> None:
        staged = {block: self._within(self._totals, block) for block in values}
        for block, value in values.items():
            staged[block].copy_(value, non_blocking=True)
        self._device.wait()
        self._exchange.publish(step, staged)

    def pull(self, step: int, values: Values) -> None:
        self._exchange.pull(step, {block: self._within(self._totals, block) for block in values})
        for total, came in zip(self._there.total, self._totals, strict=True):
            total.copy_(came, non_blocking=True)
        # The servers write there again once they have heard of this worker.
        self._device.wait()
        for block, value in values.items():
            _copy(self.room(block), value)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)


UNIT_CHANNEL = 16

Head = dict[str, Any]
Blocks = Mapping[int, torch.Tensor]
"""Flat tensors by block, in the memory of the host."""


class UnitPlan:
    """Of each server, by its position: the blocks that it leads as their primary and those in which it follows others.

    `holders` has for each block the positions of the servers that hold it, the primary first. A worker pushes to a
    server all blocks that it holds, and pulls those that it leads. The first server is the hub.
    """

    def __init__(self, plan: Sequence[Bucket], holders: Sequence[Sequence[int]], servers: Sequence[int]) -> None:
        self.servers = tuple(servers)
        self.hub = self.servers[0]
        self.held: dict[int, tuple[int, ...]] = {}
        self.led: dict[int, tuple[int, ...]] = {}
        self.followed: dict[int, dict[int, tuple[int, ...]]] = {}
        self.pushed: dict[int, tuple[Parcel, ...]] = {}
        self.published: dict[int, tuple[Parcel, ...]] = {}
        itemsizes = [dtype_of(bucket).itemsize for bucket in plan]
        for server in self.servers:
            held = [block for block, places in enumerate(holders) if server in places]
            by_primary = {at: tuple(block for block in held if holders[block][0] == at) for at in sorted(self.servers)}
            self.held[server], self.led[server] = tuple(held), by_primary.pop(server)
            self.followed[server] = {primary: blocks for primary, blocks in by_primary.items() if blocks}
            self.pushed[server] = plan_parcels(plan, itemsizes, held, lie_in_buckets=False)
            self.published[server] = plan_parcels(plan, itemsizes, self.led[server], lie_in_buckets=False)


class UnitChannel:
    """One end of a link. Frames are numbered in each direction: one that is lost or out of turn is refused."""

    def __init__(self, link: Link, generation: GenerationId, deadline: Deadline) -> None:
        self._link = link
        self._generation = generation
        self._deadline = deadline
        self._sent = self._received = 0
        self._packing = Packing()

    def send(self, head: Head, parcels: Sequence[Parcel] = (), blocks: Blocks | None = None) -> None:
        """Send a head, and of these blocks what is in the parcels."""
        self.send_bytes(json.dumps(head).encode())
        for parcel in parcels:
            assert blocks is not None, "there is something to be sent in parcels"
            self.send_bytes(as_bytes(self._packing.packed([blocks[slot.index] for slot in parcel.slots])))

    def receive(self) -> Head:
        head: Head = json.loads(self.receive_bytes())
        return head

    def receive_blocks(self, parcels: Sequence[Parcel], into: Blocks) -> None:
        """Fill these blocks with what comes in parcels."""
        for parcel in parcels:
            with self._packing.unpacked([into[slot.index] for slot in parcel.slots]) as content:
                self._link.receive_into(self._tag(self._received), as_bytes(content), self._deadline)
            self._received += 1

    def send_bytes(self, content: bytes | memoryview) -> None:
        self._link.send(self._tag(self._sent), content, self._deadline)
        self._sent += 1

    def receive_bytes(self) -> bytes:
        content = self._link.receive(self._tag(self._received), self._deadline)
        self._received += 1
        return bytes(content)

    def close(self) -> None:
        self._link.close()

    def _tag(self, number: int) -> Tag:
        return Tag(self._generation, 0, UNIT_CHANNEL, number)
