"""The methods by which gradients are compressed: the largest elements of each block, or all of them in 8 bits."""

import math
from collections.abc import Sequence

import numpy
import torch
from numpy.typing import NDArray

from quorate.lanes.buckets import Bucket
from quorate.spec.job import JobSpec
from quorate.strategies.compression.compressor import (
    Dense,
    MalformedGradient,
    Method,
    Sparse,
    decode_ascending,
    encode_ascending,
)
from quorate.strategies.compression.option import CompressSpec, lane_compression
from quorate.strategies.compression.residuals import Residuals


def method_of(compress: CompressSpec) -> Method:
    """What a job takes of a gradient."""
    return EightBits() if compress.top_k is None else TopK(compress.top_k)


def residuals_of(spec: JobSpec, plan: Sequence[Bucket], descriptor: int | None = None) -> Residuals | None:
    """What a job's lanes hold back, in the memory that this descriptor is of; None where they hold nothing back."""
    compress = lane_compression(spec.strategy)
    return Residuals(plan, spec.lanes, descriptor) if compress is not None and compress.feedback else None


RUN = 1024
"""Elements that share a scale. No run reaches beyond its block: a block has one code, whoever encodes it with which
others."""

_LARGEST = 127


class EightBits:
    """Every element, as a multiple of the scale of its run: a whole number of −127 … 127.

    A run with an element that is not finite comes back as NaN altogether: it is for the loss to say what is wrong.
    """

    def encode(self, flat: torch.Tensor, sizes: Sequence[int]) -> tuple[bytes, Dense]:
        values = _computed(flat)
        starts, lengths = _runs(sizes)
        with numpy.errstate(all="ignore"):
            largest = numpy.maximum.reduceat(numpy.abs(values), starts) if len(starts) else values[:0]
            scales = numpy.where(numpy.isfinite(largest), largest / _LARGEST, numpy.nan).astype(values.dtype)
            multiples = numpy.rint(values / numpy.repeat(scales, lengths))
            # 0 / 0 and whatever a scale makes of it that has no room for so small a number: it is held back.
            numpy.nan_to_num(multiples, copy=False, nan=0.0)
            codes = numpy.clip(multiples, -_LARGEST, _LARGEST).astype(numpy.int8)
        codes[numpy.repeat(scales == 0, lengths)] = 0
        return scales.tobytes() + codes.tobytes(), Dense(_restored(codes, scales, lengths, flat.dtype))

    def decode(self, payload: memoryview, dtype: torch.dtype, sizes: Sequence[int]) -> tuple[Dense, int]:
        starts, lengths = _runs(sizes)
        computed = _computed(torch.empty(0, dtype=dtype)).dtype
        split, end = len(starts) * computed.itemsize, len(starts) * computed.itemsize + sum(sizes)
        if len(payload) < end:
            raise MalformedGradient(f"it has {len(payload)} bytes where {end} are expected")
        scales = numpy.frombuffer(payload[:split], dtype=computed)
        codes = numpy.frombuffer(payload[split:end], dtype=numpy.int8)
        if (codes == -128).any() or (scales < 0).any() or numpy.isinf(scales).any():
            raise MalformedGradient("it has a code that no gradient has")
        return Dense(_restored(codes, scales, lengths, dtype)), end


def _computed(flat: torch.Tensor) -> NDArray[numpy.floating]:
    """In the type that is computed in: halves would lose what is divided."""
    return (flat if flat.dtype is torch.float64 else flat.float()).numpy()


def _restored(
    codes: NDArray[numpy.int8], scales: NDArray[numpy.floating], lengths: NDArray[numpy.int64], dtype: torch.dtype
) -> torch.Tensor:
    with numpy.errstate(all="ignore"):
        values = codes.astype(scales.dtype) * numpy.repeat(scales, lengths)
    return torch.from_numpy(values).to(dtype)


def _runs(sizes: Sequence[int]) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]:
    """Where each run begins, and how long it is."""
    of = numpy.asarray(sizes, dtype=numpy.int64)
    counts = -(-of // RUN)
    ends = numpy.cumsum(of)
    first = numpy.repeat(numpy.cumsum(counts) - counts, counts)
    within = (numpy.arange(counts.sum(), dtype=numpy.int64) - first) * RUN
    starts = numpy.repeat(ends - of, counts) + within
    return starts, numpy.minimum(numpy.repeat(ends, counts) - starts, RUN)


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class TopK:
    """The elements of a block that are furthest from zero: of each block this fraction, and at least one.

    Which they are depends on nothing but its content: elements of equal size go by the lower place, which `torch.topk`
    leaves open.
    """

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction

    def encode(self, flat: torch.Tensor, sizes: Sequence[int]) -> tuple[bytes, Sparse]:
        # Whole numbers in the order of the absolute values: the bits without the sign. NaN is beyond infinity.
        kind = _INTEGERS[flat.itemsize]
        magnitudes = flat.view(kind).numpy() & torch.iinfo(kind).max
        chosen, start = [], 0
        for size in sizes:
            if size:
                of_block = largest(magnitudes[start : start + size], count_of(self._fraction, size))
                chosen.append(of_block + start)
            start += size
        places = numpy.concatenate(chosen) if chosen else numpy.empty(0, dtype=numpy.int64)
        content = Sparse(torch.from_numpy(places), flat[torch.from_numpy(places)])
        values = content.values.view(torch.uint8).numpy().tobytes() if len(places) else b""
        return encode_ascending(places) + values, content

    def decode(self, payload: memoryview, dtype: torch.dtype, sizes: Sequence[int]) -> tuple[Sparse, int]:
        counts = [count_of(self._fraction, size) for size in sizes]
        places, split = decode_ascending(payload, sum(counts), sum(sizes))
        ends = numpy.cumsum(sizes)
        if (numpy.diff(numpy.searchsorted(places, ends), prepend=0) != counts).any():
            raise MalformedGradient("it has more of one block and less of another than is expected")
        end = split + len(places) * dtype.itemsize
        if len(payload) < end:
            raise MalformedGradient(f"it has {len(payload)} bytes where {end} are expected")
        values = torch.empty(len(places), dtype=dtype)
        values.view(torch.uint8).numpy()[:] = numpy.frombuffer(payload[split:end], dtype=numpy.uint8)
        return Sparse(torch.from_numpy(places), values), end


def count_of(fraction: float, size: int) -> int:
    """How many elements go of a block: at least one, where it has any."""
    return min(size, math.ceil(fraction * size))


def largest(magnitudes: NDArray[numpy.integer], count: int) -> NDArray[numpy.int64]:
    """The places of the largest, ascending; of equal ones those that come first."""
    least = numpy.partition(magnitudes, len(magnitudes) - count)[len(magnitudes) - count]
    chosen = numpy.flatnonzero(magnitudes >= least)
    if len(chosen) > count:
        ties = numpy.flatnonzero(magnitudes[chosen] == least)
        chosen = numpy.delete(chosen, ties[count - len(chosen) :])
    return chosen
