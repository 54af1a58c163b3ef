"""Gradients in 8 bits: a scale for each run of 1024 elements of a block, and a whole number of −127 … 127 for each.

A run with an element that is not finite comes back as NaN altogether: it is for the loss to say what is wrong.
"""

from collections.abc import Sequence

import numpy
import torch
from numpy.typing import NDArray

from quorate.strategies.compression.encoded import Dense, MalformedGradient

RUN = 1024
"""Elements that share a scale. No run reaches beyond its block: a block has one code, whoever encodes it with which
others."""

_LARGEST = 127


class EightBits:
    """Every element, as a multiple of the scale of its run."""

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
