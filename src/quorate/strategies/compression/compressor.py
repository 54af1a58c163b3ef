"""Lanes' gradients as few bytes, and their sum: what a worker encodes, whoever sums decodes.

The ring encodes all blocks for everybody; a worker of parameter servers encodes for each server the blocks that it
holds. A block, one parameter, has the same code and the same sum either way: lanes are added in the order of the ring,
by bucket and chunk, from zeros.
"""

import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy
import torch
from numpy.typing import NDArray

from quorate.collectives.block_sums import Block, add_up_block, plan_blocks
from quorate.collectives.memory import dtype_of
from quorate.core.errors import FrameError
from quorate.lanes.buckets import Bucket
from quorate.lanes.chunks import cut

_FORMAT = 1
_HEADER = struct.Struct("<BIq")
_WIDTHS = (1, 2, 4, 8)


class MalformedGradient(FrameError):  # noqa: N818 (a happening, not a mistake)
    """Bytes that are no encoded gradient of this job. Its text begins in lower case."""


@dataclass(frozen=True)
class Sparse:
    """Some elements: their places in the flat tensor, ascending, and their values."""

    places: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class Dense:
    """Every element, rounded."""

    values: torch.Tensor


Content = Sparse | Dense


def encode_ascending(places: NDArray[numpy.int64]) -> bytes:
    """Ascending places as the gaps between them, after the bytes that the largest of them needs."""
    gaps = numpy.diff(places, prepend=-1) - 1
    width = numpy.min_scalar_type(gaps.max(initial=0)).itemsize
    return bytes([width]) + gaps.astype(f"<u{width}").tobytes()


def decode_ascending(payload: memoryview, count: int, below: int) -> tuple[NDArray[numpy.int64], int]:
    """So many places, all below a limit, and how many bytes they took."""
    width = payload[0] if len(payload) else 0
    end = 1 + count * width
    if width not in _WIDTHS or len(payload) < end:
        raise MalformedGradient(f"it has {len(payload)} bytes, too few for {count} places")
    gaps = numpy.frombuffer(payload[1:end], f"<u{width}")
    # Before they are added up: a sum of 64 bits may come out small again.
    if (gaps >= below).any() or gaps.astype(numpy.float64).sum() > 2 * below:
        raise MalformedGradient(f"it has a place beyond the {below} elements of its blocks")
    places = numpy.cumsum(gaps.astype(numpy.int64) + 1) - 1
    if count and places[-1] >= below:
        raise MalformedGradient(f"it has a place beyond the {below} elements of its blocks")
    return places, end


class Method(Protocol):
    """What is taken of the values of some blocks, which lie one behind the other and have these sizes."""

    def encode(self, flat: torch.Tensor, sizes: Sequence[int]) -> tuple[bytes, Content]:
        """The bytes, and what whoever decodes them will have."""
        ...

    def decode(self, payload: memoryview, dtype: torch.dtype, sizes: Sequence[int]) -> tuple[Content, int]:
        """That, and how many bytes it took. Raises MalformedGradient where these are none that `encode` makes."""
        ...


@dataclass(frozen=True)
class _Part:
    """What of a lane is encoded together: the blocks of one bucket that the lane has a gradient of."""

    bucket: int
    blocks: tuple[Block, ...]
    content: Content

    def places(self) -> torch.Tensor:
        """In the bucket: blocks that are not encoded may lie between those that are."""
        assert isinstance(self.content, Sparse), "only that has places"
        places, shifts, end = self.content.places, [], 0
        ends = []
        for block in self.blocks:
            shifts.append(block.slot.offset - end)
            end += block.slot.numel
            ends.append(end)
        if not any(shifts):
            return places
        of = torch.searchsorted(torch.tensor(ends), places, right=True)
        return places + torch.tensor(shifts)[of]

    def whole_blocks(self) -> Iterator[tuple[Block, torch.Tensor]]:
        """Each block with its values, where every element is sent."""
        assert isinstance(self.content, Dense), "lanes are encoded alike"
        return zip(self.blocks, torch.split(self.content.values, _sizes(self.blocks)), strict=True)


@dataclass(frozen=True)
class EncodedLane:
    """One lane's gradient on its way: its bytes, and what they stand for."""

    payload: bytes
    parts: tuple[_Part, ...]

    def take_out(self, buckets: Sequence[torch.Tensor]) -> None:
        """Leave in a lane's flat buckets what has not been sent of them."""
        for part in self.parts:
            flat = buckets[part.bucket]
            if isinstance(part.content, Sparse):
                flat[part.places()] = 0
                continue
            for block, sent in part.whole_blocks():
                flat[block.slot.place].sub_(sent)

    def add_to(self, values: Mapping[int, torch.Tensor]) -> None:
        """Add what was sent to flat tensors, by block."""
        for part in self.parts:
            if isinstance(part.content, Dense):
                for block, sent in part.whole_blocks():
                    values[block.index].add_(sent)
                continue
            places, ends = part.content.places, torch.tensor(_sizes(part.blocks)).cumsum(0)
            counts = torch.searchsorted(places, ends).diff(prepend=torch.zeros(1, dtype=torch.int64)).tolist()
            of_blocks = zip(torch.split(places, counts), torch.split(part.content.values, counts), strict=True)
            for block, end, (found, sent) in zip(part.blocks, ends.tolist(), of_blocks, strict=True):
                # No place comes twice.
                values[block.index][found - (end - block.slot.numel)] += sent


class Compressor:
    """Encodes lanes' gradients, and sums what others have encoded. `blocks` are the parameters, by number, that it is
    for; all of them if not given. Gradients and totals are flat buckets of the plan."""

    def __init__(
        self, method: Method, plan: Sequence[Bucket], lanes: int, blocks: Collection[int] | None = None
    ) -> None:
        self._method = method
        self._plan = plan
        self._lanes = lanes
        chosen = [block for block in plan_blocks(plan, lanes) if blocks is None or block.index in blocks]
        # In the order of the plan, in which they lie.
        self._blocks = sorted(chosen, key=lambda block: (block.bucket, block.slot.offset))
        self._chunk_ends = [numpy.asarray([place.stop for place in cut(bucket.numel, lanes)]) for bucket in plan]

    @property
    def blocks(self) -> list[int]:
        """The parameters that it is for, by number."""
        return [block.index for block in self._blocks]

    @property
    def dense_bytes(self) -> int:
        """The bytes of one lane's gradient as it is."""
        return sum(block.slot.numel * dtype_of(self._plan[block.bucket]).itemsize for block in self._blocks)

    def encode(self, step: int, lane: int, present: int, buckets: Sequence[torch.Tensor]) -> EncodedLane:
        """The lane's gradient of the parameters that it is `present` for, as bits."""
        bitmap = sum(1 << i for i, block in enumerate(self._blocks) if present >> block.index & 1)
        pieces = [_HEADER.pack(_FORMAT, lane, step), bitmap.to_bytes(self._bitmap_size, "little")]
        parts = []
        for bucket, blocks in self._groups(bitmap):
            payload, content = self._method.encode(_joined(buckets[bucket], blocks), _sizes(blocks))
            pieces.append(payload)
            parts.append(_Part(bucket, blocks, content))
        return EncodedLane(b"".join(pieces), tuple(parts))

    def decode(self, step: int, lane: int, payload: bytes | memoryview) -> EncodedLane:
        """What somebody has encoded for this step and lane. Raises MalformedGradient where it is anything else."""
        content = memoryview(payload)
        start = _HEADER.size + self._bitmap_size
        if len(content) < start:
            raise self._malformed(step, lane, f"it has {len(content)} bytes, and its head alone has {start}")
        version, of_lane, of_step = _HEADER.unpack_from(content)
        if (version, of_lane, of_step) != (_FORMAT, lane, step):
            told = f"it is of lane {of_lane} at step {of_step}, in format {version}, and format {_FORMAT} is expected"
            raise self._malformed(step, lane, told)
        bitmap = int.from_bytes(content[_HEADER.size : start], "little")
        if bitmap >> len(self._blocks):
            raise self._malformed(step, lane, f"it has more than the {len(self._blocks)} blocks that are expected")
        parts = []
        for bucket, blocks in self._groups(bitmap):
            try:
                found, size = self._method.decode(content[start:], dtype_of(self._plan[bucket]), _sizes(blocks))
            except MalformedGradient as error:
                raise self._malformed(step, lane, str(error)) from None
            start += size
            parts.append(_Part(bucket, blocks, found))
        if start != len(content):
            raise self._malformed(step, lane, f"it has {len(content)} bytes where {start} are expected")
        return EncodedLane(bytes(payload), tuple(parts))

    def add_up(self, lanes: Mapping[int, EncodedLane], totals: Sequence[torch.Tensor]) -> None:
        """Fill the blocks' places in the totals with the sum over all lanes, in the order of the ring."""
        if sorted(lanes) != list(range(self._lanes)):
            raise ValueError(f"a sum is over lanes 0 to {self._lanes - 1}, not {sorted(lanes)}")
        for bucket in sorted({block.bucket for block in self._blocks}):
            blocks = tuple(block for block in self._blocks if block.bucket == bucket)
            parts = {lane: part for lane, of in lanes.items() for part in of.parts if part.bucket == bucket}
            if any(isinstance(part.content, Dense) for part in parts.values()):
                self._add_dense(blocks, parts, totals[bucket])
            else:
                self._add_sparse(bucket, blocks, parts, totals[bucket])

    def _add_dense(self, blocks: Sequence[Block], parts: Mapping[int, _Part], total: torch.Tensor) -> None:
        values: dict[tuple[int, int], torch.Tensor] = {}
        for lane, part in parts.items():
            values |= {(lane, block.index): sent for block, sent in part.whole_blocks()}
        for block in blocks:
            out = total[block.slot.place]
            nothing = torch.zeros(1, dtype=total.dtype).expand(block.slot.numel)
            add_up_block([values.get((lane, block.index), nothing) for lane in range(self._lanes)], block.pieces, out)

    def _add_sparse(
        self, bucket: int, blocks: Sequence[Block], parts: Mapping[int, _Part], total: torch.Tensor
    ) -> None:
        for start, stop in _stretches(blocks):
            total[start:stop].zero_()
        rounds: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(self._lanes)]
        for lane, part in parts.items():
            assert isinstance(part.content, Sparse), "lanes are encoded alike"
            places, values = part.places(), part.content.values
            # Ascending, so each chunk has a stretch of them.
            ends = numpy.searchsorted(places.numpy(), self._chunk_ends[bucket])
            start = 0
            for chunk, end in enumerate(ends.tolist()):
                if start < end:
                    rounds[(lane - chunk - 1) % self._lanes].append((places[start:end], values[start:end]))
                start = end
        for added in filter(None, rounds):
            # Each chunk is another lane's turn in a round, so no place comes twice.
            total.index_add_(0, *(torch.cat(column) for column in zip(*added, strict=True)))

    @property
    def _bitmap_size(self) -> int:
        return -(-len(self._blocks) // 8)

    def _groups(self, bitmap: int) -> list[tuple[int, tuple[Block, ...]]]:
        """The blocks of a bitmap, by bucket."""
        groups: dict[int, list[Block]] = {}
        for number, block in enumerate(self._blocks):
            if bitmap >> number & 1:
                groups.setdefault(block.bucket, []).append(block)
        return [(bucket, tuple(blocks)) for bucket, blocks in groups.items()]

    def _malformed(self, step: int, lane: int, why: str) -> MalformedGradient:
        return MalformedGradient(f"the encoded gradient of lane {lane} at step {step} is damaged: {why}")


def _stretches(blocks: Sequence[Block]) -> list[tuple[int, int]]:
    """Where the blocks of a bucket lie, neighbours together."""
    stretches: list[tuple[int, int]] = []
    for block in blocks:
        start, stop = block.slot.place.start, block.slot.place.stop
        if stretches and stretches[-1][1] == start:
            stretches[-1] = (stretches[-1][0], stop)
        else:
            stretches.append((start, stop))
    return stretches


def _joined(flat: torch.Tensor, blocks: Sequence[Block]) -> torch.Tensor:
    """The blocks' values, one behind the other; without a copy where they lie so."""
    stretches = [flat[start:stop] for start, stop in _stretches(blocks)]
    return stretches[0] if len(stretches) == 1 else torch.cat(stretches)


def _sizes(blocks: Sequence[Block]) -> list[int]:
    return [block.slot.numel for block in blocks]
