"""What travels between a worker and a server: a head in JSON, then the tensors that it is about, in parcels."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from quorate.core.generation import GenerationId
from quorate.lanes.buckets import Bucket
from quorate.reduce.memory import dtype_of
from quorate.strategies.servers.exchange import Packing, Parcel, plan_parcels
from quorate.strategies.servers.links import as_bytes
from quorate.wire.link import Deadline, Link, Tag

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
