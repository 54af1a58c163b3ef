"""How far the values of blocks have moved, as few bytes: what parameter servers answer where gradients are compressed.

Each block has one code, whichever others it is sent with: who holds it changes nothing in what workers have.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from quorate.strategies.compression.compressor import Method
from quorate.strategies.compression.encoded import Content, MalformedGradient, Sparse

_FORMAT = 1
_HEADER = struct.Struct("<BqI")


@dataclass(frozen=True)
class EncodedDeltas:
    """Some blocks' deltas on their way: their bytes, and what these stand for, by blocks of one type."""

    payload: bytes
    parts: tuple[tuple[tuple[int, ...], Content], ...]

    def add_to(self, values: Mapping[int, torch.Tensor]) -> None:
        """Move flat values, by block, as far as was told."""
        for blocks, content in self.parts:
            sizes = [values[block].numel() for block in blocks]
            if not isinstance(content, Sparse):
                for block, moved in zip(blocks, torch.split(content.values, sizes), strict=True):
                    values[block].add_(moved)
                continue
            ends = torch.tensor(sizes).cumsum(0)
            counts = torch.searchsorted(content.places, ends).diff(prepend=torch.zeros(1, dtype=torch.int64)).tolist()
            starts = (ends - torch.tensor(sizes)).tolist()
            told = zip(torch.split(content.places, counts), torch.split(content.values, counts), strict=True)
            for block, start, (places, moved) in zip(blocks, starts, told, strict=True):
                # No place comes twice.
                values[block][places - start] += moved


class Deltas:
    """Encodes deltas with the method of a job, and decodes them. `dtypes` and `sizes` are those of all blocks."""

    def __init__(self, method: Method, dtypes: Mapping[int, torch.dtype], sizes: Mapping[int, int]) -> None:
        self._method = method
        self._dtypes = dtypes
        self._sizes = sizes

    def encode(self, step: int, moved: Mapping[int, torch.Tensor]) -> EncodedDeltas:
        """What of these flat differences is told after a step."""
        pieces, parts = [_HEADER.pack(_FORMAT, step, len(moved))], []
        for _, blocks in self._groups(sorted(moved)):
            flat = torch.cat([moved[block] for block in blocks])
            payload, content = self._method.encode(flat, self._sizes_of(blocks))
            pieces.append(payload)
            parts.append((blocks, content))
        return EncodedDeltas(b"".join(pieces), tuple(parts))

    def decode(self, step: int, blocks: Sequence[int], payload: memoryview) -> EncodedDeltas:
        """What somebody has encoded of these blocks. Raises MalformedGradient where it is anything else."""
        if len(payload) < _HEADER.size or _HEADER.unpack_from(payload) != (_FORMAT, step, len(blocks)):
            raise MalformedGradient(f"what a server answers at step {step} is not of that step and its blocks")
        start, parts = _HEADER.size, []
        for dtype, group in self._groups(sorted(blocks)):
            content, size = self._method.decode(payload[start:], dtype, self._sizes_of(group))
            start += size
            parts.append((group, content))
        if start != len(payload):
            raise MalformedGradient(f"what a server answers has {len(payload)} bytes where {start} are expected")
        return EncodedDeltas(b"", tuple(parts))

    def _groups(self, blocks: Sequence[int]) -> Iterator[tuple[torch.dtype, tuple[int, ...]]]:
        groups: dict[torch.dtype, list[int]] = {}
        for block in blocks:
            groups.setdefault(self._dtypes[block], []).append(block)
        for dtype, of in groups.items():
            yield dtype, tuple(of)

    def _sizes_of(self, blocks: Sequence[int]) -> list[int]:
        return [self._sizes[block] for block in blocks]
