"""Some elements of a gradient: the largest of each block.

Of each block that is not empty at least one element goes. Which they are depends on nothing but its content: elements
of equal size go by the lower place, which `torch.topk` leaves open.
"""

import math
from collections.abc import Sequence

import numpy
import torch
from numpy.typing import NDArray

from quorate.strategies.compression.encoded import MalformedGradient, Sparse, decode_ascending, encode_ascending

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_SAMPLED = 2**16
"""Elements from which a block is looked at twice: a sample first, to know which elements can be among the largest."""
_SAMPLE = 2**12


class TopK:
    """The elements of a block that are furthest from zero: of each block this fraction."""

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction

    def encode(self, flat: torch.Tensor, sizes: Sequence[int]) -> tuple[bytes, Sparse]:
        magnitudes = _magnitudes(flat)
        chosen, start = [], 0
        for size in sizes:
            if size:
                of_block = largest(magnitudes[start : start + size], count_of(self._fraction, size))
                chosen.append(of_block + start)
            start += size
        places = numpy.concatenate(chosen) if chosen else numpy.empty(0, dtype=numpy.int64)
        content = _picked(flat, places)
        return encode_ascending(places) + _as_bytes(content.values), content

    def decode(self, payload: memoryview, dtype: torch.dtype, sizes: Sequence[int]) -> tuple[Sparse, int]:
        counts = [count_of(self._fraction, size) for size in sizes]
        places, split = decode_ascending(payload, sum(counts), sum(sizes))
        ends = numpy.cumsum(sizes)
        if (numpy.diff(numpy.searchsorted(places, ends), prepend=0) != counts).any():
            raise MalformedGradient("it has more of one block and less of another than is expected")
        values, end = _values(payload, split, len(places), dtype)
        return Sparse(torch.from_numpy(places), values), end


def count_of(fraction: float, size: int) -> int:
    """How many elements go of a block: at least one, where it has any."""
    return min(size, math.ceil(fraction * size))


def largest(magnitudes: NDArray[numpy.integer], count: int) -> NDArray[numpy.int64]:
    """The places of the largest, ascending; of equal ones those that come first."""
    candidates = _candidates(magnitudes, count)
    of = magnitudes if candidates is None else magnitudes[candidates]
    least = numpy.partition(of, len(of) - count)[len(of) - count]
    chosen = numpy.flatnonzero(of >= least)
    if len(chosen) > count:
        ties = numpy.flatnonzero(of[chosen] == least)
        chosen = numpy.delete(chosen, ties[count - len(chosen) :])
    return chosen if candidates is None else candidates[chosen]


def _candidates(magnitudes: NDArray[numpy.integer], count: int) -> NDArray[numpy.int64] | None:
    """Few places among which the largest are for sure; None where that cannot be told by a sample."""
    size = len(magnitudes)
    if size < _SAMPLED or 4 * count > size:
        return None
    sample = magnitudes[:: size // _SAMPLE]
    rank = min(len(sample), 2 * math.ceil(len(sample) * count / size) + 8)
    bound = numpy.partition(sample, len(sample) - rank)[len(sample) - rank]
    found = numpy.flatnonzero(magnitudes >= bound)
    return found if len(found) >= count else None


def _magnitudes(flat: torch.Tensor) -> NDArray[numpy.integer]:
    """Whole numbers in the order of the absolute values: the bits without the sign. NaN is beyond infinity."""
    kind = _INTEGERS[flat.itemsize]
    found: NDArray[numpy.integer] = flat.view(kind).numpy() & torch.iinfo(kind).max
    return found


def _picked(flat: torch.Tensor, places: NDArray[numpy.int64]) -> Sparse:
    indices = torch.from_numpy(places)
    return Sparse(indices, flat[indices])


def _as_bytes(values: torch.Tensor) -> bytes:
    return values.view(torch.uint8).numpy().tobytes() if len(values) else b""


def _values(payload: memoryview, start: int, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    end = start + count * dtype.itemsize
    if len(payload) < end:
        raise MalformedGradient(f"it has {len(payload)} bytes where {end} are expected")
    values = torch.empty(count, dtype=dtype)
    values.view(torch.uint8).numpy()[:] = numpy.frombuffer(payload[start:end], dtype=numpy.uint8)
    return values, end
