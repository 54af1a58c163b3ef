"""How one tensor of a bucket is summed by itself, in the order that the sum of the whole bucket would have.

Parameter servers hold single parameters. The ring sums whole buckets, each cut into as many chunks as there are lanes,
and a chunk has its own order of lanes. So a tensor falls into pieces where the chunks of its bucket meet.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quorate.collectives.reduction import add_up_in_stretches
from quorate.lanes.buckets import Bucket, Slot
from quorate.lanes.chunks import cut, summation_order


@dataclass(frozen=True)
class Piece:
    """Elements of a tensor that lie in one chunk of its bucket, and the lanes in the order in which they are added."""

    place: slice
    order: tuple[int, ...]


@dataclass(frozen=True)
class Block:
    """A tensor that is summed by itself: its number in the plan's sequence, where it lies, and its pieces."""

    index: int
    bucket: int
    slot: Slot
    pieces: tuple[Piece, ...]


def plan_blocks(plan: Sequence[Bucket], lanes: int) -> tuple[Block, ...]:
    """Every tensor of a plan, by its index."""
    blocks = [
        Block(slot.index, number, slot, pieces_of(bucket, slot, lanes))
        for number, bucket in enumerate(plan)
        for slot in bucket.slots
    ]
    return tuple(sorted(blocks, key=lambda block: block.index))


def pieces_of(bucket: Bucket, slot: Slot, lanes: int) -> tuple[Piece, ...]:
    """They tile the tensor, in order; none is empty, so an empty tensor has none."""
    end = slot.offset + slot.numel
    pieces = []
    for chunk, place in enumerate(cut(bucket.numel, lanes)):
        start, stop = max(place.start, slot.offset), min(place.stop, end)
        if start < stop:
            pieces.append(Piece(slice(start - slot.offset, stop - slot.offset), summation_order(chunk, lanes)))
    return tuple(pieces)


def add_up_block(lane_values: Sequence[torch.Tensor], pieces: Sequence[Piece], total: torch.Tensor) -> None:
    """The sum of one tensor of a bucket: the bits that `sum_lanes` gives in its place there.

    `lane_values` has the tensor's flat values of all lanes, in lane order.
    """
    for piece in pieces:
        add_up_in_stretches([lane_values[lane][piece.place] for lane in piece.order], total[piece.place])
