"""What an encoded gradient holds, and the bytes of its whole numbers."""

from dataclasses import dataclass

import numpy
import torch
from numpy.typing import NDArray

from quorate.core.errors import FrameError

_BITS = 7
_LONGEST = 9
"""Bytes of the largest whole number: 63 bits."""


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
    """Ascending places as the gaps between them, each in as few bytes of 7 bits as it needs, the lowest first."""
    gaps = numpy.diff(places, prepend=-1) - 1
    lengths = numpy.ones(len(gaps), dtype=numpy.int64)
    for count in range(1, _LONGEST):
        longer = gaps >= 1 << (_BITS * count)
        if not longer.any():
            break
        lengths += longer
    ends = numpy.cumsum(lengths)
    starts = ends - lengths
    content = numpy.empty(int(ends[-1]) if len(ends) else 0, dtype=numpy.uint8)
    for number in range(int(lengths.max(initial=0))):
        has = slice(None) if number == 0 else lengths > number
        digit = gaps[has] >> (_BITS * number) & 0x7F
        content[starts[has] + number] = digit | (lengths[has] > number + 1) << _BITS
    return content.tobytes()


def decode_ascending(payload: memoryview, count: int, below: int) -> tuple[NDArray[numpy.int64], int]:
    """So many places, all below a limit, and how many bytes they took."""
    # No place takes more bytes than this, so that no more is looked at than there can be.
    content = numpy.frombuffer(payload[: count * _LONGEST], dtype=numpy.uint8)
    ends = numpy.flatnonzero(content < 1 << _BITS)[:count] + 1
    if len(ends) < count:
        raise MalformedGradient(f"it has {len(ends)} places where {count} are expected")
    if not count:
        return numpy.empty(0, dtype=numpy.int64), 0
    starts = numpy.concatenate(([0], ends[:-1]))
    lengths = ends - starts
    longest = int(lengths.max())
    if longest > _LONGEST or (content[ends - 1][lengths > 1] == 0).any():
        raise MalformedGradient("it has a place that is not written as places are")
    gaps = numpy.zeros(count, dtype=numpy.int64)
    for number in range(longest):
        has = lengths > number
        gaps[has] |= (content[starts[has] + number].astype(numpy.int64) & 0x7F) << (_BITS * number)
    if int(gaps.max()) >= below or int(gaps.astype(numpy.float64).sum()) > 2 * below:
        raise MalformedGradient(f"it has a place beyond the {below} elements of its blocks")
    places = numpy.cumsum(gaps + 1) - 1
    if places[-1] >= below:
        raise MalformedGradient(f"it has a place beyond the {below} elements of its blocks")
    return places, int(ends[-1])
