"""What travels between workers and parameter servers in one frame, and who speaks with whom when.

Both ends compute the same parcels from the plan and the placement, so a frame needs no table of contents.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from quorate.lanes.buckets import Bucket, Slot

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


def meetings(workers: int, servers: int, *, worker: int | None = None, server: int | None = None) -> tuple[int, ...]:
    """The servers that a worker meets, or the workers that a server meets, one after the other.

    As in a tournament: in each round everybody meets one other at most, and both go through the rounds in the same
    order. So nobody waits in a circle, and no server is idle while all workers crowd at the first.
    """
    rounds = max(workers, servers)
    if worker is not None:
        partners = [(worker + round_) % rounds for round_ in range(rounds)]
        return tuple(partner for partner in partners if partner < servers)
    assert server is not None, "one of the two is asked for"
    partners = [(server - round_) % rounds for round_ in range(rounds)]
    return tuple(partner for partner in partners if partner < workers)
