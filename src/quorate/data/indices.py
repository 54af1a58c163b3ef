"""Numbers of samples or blocks, many at a time."""

from collections.abc import Sequence

import numpy

Indices = numpy.ndarray[tuple[int], numpy.dtype[numpy.int64]]

NO_INDICES: Indices = numpy.empty(0, dtype=numpy.int64)


def indices_of(numbers: Sequence[int] | Indices) -> Indices:
    """As an array; the same one if it is one already."""
    return numpy.asarray(numbers, dtype=numpy.int64)


def joined(parts: Sequence[Indices]) -> Indices:
    """One behind the other; a part that is alone is not copied."""
    if len(parts) == 1:
        return parts[0]
    return numpy.concatenate(parts) if parts else NO_INDICES
