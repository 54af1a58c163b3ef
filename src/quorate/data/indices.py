"""Numbers of samples or blocks, many at a time: as arrays, and as ranges, which are short where many lie together."""

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

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


Ranges = tuple[tuple[int, int], ...]
"""The first and the last number of each, in order. What occurs twice is in two of them."""


def ranges_of(numbers: Sequence[int] | Indices) -> Ranges:
    """As few as hold them all, each as often as it occurs."""
    ordered = numpy.sort(indices_of(numbers))
    if not len(ordered):
        return ()
    breaks = numpy.flatnonzero(numpy.diff(ordered) != 1)
    firsts = ordered[numpy.concatenate(([0], breaks + 1))]
    lasts = ordered[numpy.concatenate((breaks, [len(ordered) - 1]))]
    return tuple(zip(firsts.tolist(), lasts.tolist(), strict=True))


def numbers_in(ranges: Ranges) -> Indices:
    """One by one, in order."""
    if not ranges:
        return NO_INDICES
    firsts, lasts = indices_of([first for first, _ in ranges]), indices_of([last for _, last in ranges])
    lengths = lasts - firsts + 1
    begins = numpy.cumsum(lengths) - lengths
    return indices_of(numpy.repeat(firsts - begins, lengths) + numpy.arange(lengths.sum()))


def count_in(ranges: Ranges) -> int:
    """How many numbers they hold."""
    return sum(last - first + 1 for first, last in ranges)


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """All of their numbers, each once. They may overlap, and are never written out: a range may be of any length."""
    united: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if united and first <= united[-1][1] + 1:
            united[-1] = united[-1][0], max(united[-1][1], last)
        else:
            united.append((first, last))
    return tuple(united)


@runtime_checkable
class Blocked(Protocol):
    """Its samples are the records of block 0, then those of block 1, and so on."""

    @property
    def blocks(self) -> Sequence[int] | Indices:
        """How many records each block has."""

    @property
    def window(self) -> int:
        """How many samples a lane shuffles at a time."""
