"""Messages between a worker and a server: a head in JSON, then the tensors that it is about, in parcels."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from quorate.core.generation import GenerationId
from quorate.strategies.servers.parcels import Parcel
from quorate.wire.link import Deadline, Link, Tag

UNIT_CHANNEL = 16

Blame = Callable[[BaseException], BaseException]
Head = dict[str, Any]
Blocks = Mapping[int, torch.Tensor]
"""Flat tensors by block, in the memory of the host."""


class UnitChannel:
    """One end of a link. Frames are numbered in each direction: one that is lost or out of turn is refused."""

    def __init__(self, link: Link, generation: GenerationId, deadline: Deadline) -> None:
        self._link = link
        self._generation = generation
        self._deadline = deadline
        self._sent = self._received = 0
        self._room: dict[tuple[torch.dtype, int], torch.Tensor] = {}
        self.bytes_sent = self.bytes_received = 0

    def send(self, head: Head, parcels: Sequence[Parcel] = (), blocks: Blocks | None = None) -> None:
        """Send a head, and of these blocks what is in the parcels."""
        self._send(json.dumps(head).encode())
        for parcel in parcels:
            assert blocks is not None, "there is something to be sent in parcels"
            parts = [blocks[slot.index] for slot in parcel.slots]
            content = parts[0] if len(parts) == 1 else torch.cat(parts, out=self._room_for(parcel, parts[0].dtype))
            self._send(bytes_of(content))

    def receive(self) -> Head:
        content = self._link.receive(self._tag(self._received), self._deadline)
        self._received += 1
        self.bytes_received += len(content)
        head: Head = json.loads(content)
        return head

    def receive_blocks(self, parcels: Sequence[Parcel], into: Blocks) -> None:
        """Fill these blocks with what comes in parcels."""
        for parcel in parcels:
            parts = [into[slot.index] for slot in parcel.slots]
            content = parts[0] if len(parts) == 1 else self._room_for(parcel, parts[0].dtype)
            view = bytes_of(content)
            self._link.receive_into(self._tag(self._received), view, self._deadline)
            self._received += 1
            self.bytes_received += len(view)
            if len(parts) > 1:
                sizes = [slot.numel for slot in parcel.slots]
                for part, came in zip(parts, torch.split_with_sizes(content, sizes), strict=True):
                    part.copy_(came)

    def send_bytes(self, content: bytes) -> None:
        self._send(content)

    def receive_bytes(self) -> bytes:
        content = self._link.receive(self._tag(self._received), self._deadline)
        self._received += 1
        self.bytes_received += len(content)
        return bytes(content)

    def close(self) -> None:
        self._link.close()

    def _send(self, content: bytes | memoryview) -> None:
        self._link.send(self._tag(self._sent), content, self._deadline)
        self._sent += 1
        self.bytes_sent += len(content)

    def _tag(self, number: int) -> Tag:
        return Tag(self._generation, 0, UNIT_CHANNEL, number)

    def _room_for(self, parcel: Parcel, dtype: torch.dtype) -> torch.Tensor:
        """Where small blocks are copied together; the same memory for each message about the same parcel."""
        room = self._room.get((dtype, parcel.first))
        if room is None or room.numel() != parcel.numel:
            room = self._room[dtype, parcel.first] = torch.empty(parcel.numel, dtype=dtype)
        return room


def bytes_of(flat: torch.Tensor) -> memoryview:
    """The bytes of a flat tensor, where they lie; bfloat16 has no type in NumPy, so they are made bytes first."""
    view: memoryview = flat.detach().view(torch.uint8).numpy().data
    return view
