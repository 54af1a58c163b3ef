"""In which order the blocks of a training set are read, and which sample stands where: pure arithmetic, without torch.

The order depends on no version of a library: it is made of additions, multiplications and a sort of unequal numbers.
"""

from dataclasses import dataclass

import numpy

from quorate.data.indices import Indices

# Splitmix64: the steps from state to state, and how a state is mixed.
_GOLDEN = numpy.uint64(0x9E3779B97F4A7C15)
_MIXING = (
    (numpy.uint64(30), numpy.uint64(0xBF58476D1CE4E5B9)),
    (numpy.uint64(27), numpy.uint64(0x94D049BB133111EB)),
)
_LAST_SHIFT = numpy.uint64(31)


def shuffle(count: int, seed: int) -> Indices:
    """A permutation of 0..count-1.

    By sorting random words. No two of them are equal, since they are mixed from unequal states by steps that can be
    undone; so every way to sort gives the same.
    """
    words = numpy.arange(count, dtype=numpy.uint64)
    words *= _GOLDEN
    words += numpy.uint64(seed)
    for shift, factor in _MIXING:
        words ^= words >> shift
        words *= factor
    words ^= words >> _LAST_SHIFT
    return numpy.argsort(words)


@dataclass(frozen=True)
class BlockOrder:
    """The blocks of an epoch in the order in which they are read; their records one after the other are its line.

    `starts` says where in the line each begins, and last where it ends. Blocks without records are left out.
    """

    blocks: Indices
    starts: Indices
    _shifts: Indices

    @classmethod
    def of(cls, records: Indices, seed: int) -> "BlockOrder":
        """Of blocks that hold so many records each; sample i is the i-th record of all blocks as they are numbered."""
        blocks = shuffle(len(records), seed)
        blocks = blocks[records[blocks] > 0]
        starts = numpy.zeros(len(blocks) + 1, dtype=numpy.int64)
        numpy.cumsum(records[blocks], out=starts[1:])
        firsts = numpy.cumsum(records) - records
        return cls(blocks, starts, firsts[blocks] - starts[:-1])

    def span(self, start: int, stop: int) -> range:
        """Which of `blocks` hold the places from start to before stop of the line."""
        if start >= stop:
            return range(0)
        first = int(numpy.searchsorted(self.starts, start, side="right")) - 1
        return range(first, int(numpy.searchsorted(self.starts, stop, side="left")))

    def samples(self, start: int, stop: int) -> Indices:
        """The samples that stand in these places."""
        span = self.span(start, stop)
        bounds = self.starts[span.start : span.stop + 1].clip(start, stop)
        shifts = numpy.repeat(self._shifts[span.start : span.stop], numpy.diff(bounds))
        return numpy.arange(start, max(start, stop), dtype=numpy.int64) + shifts
