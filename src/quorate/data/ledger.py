"""Which samples went into a step, as a digest that adds up: over lanes, steps and epochs, in any order."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy

from quorate.data.indices import Indices, indices_of

_WORD = (1 << 64) - 1
_WORDS = numpy.dtype(numpy.uint64)
_SPREAD = numpy.uint64(0x9E3779B97F4A7C15)
_HALF = numpy.uint64(32)
_DIGITS = 32
# So many at once: the words of a large training set would take several times the memory of its order.
_SLICE = 1 << 20


@dataclass(frozen=True, slots=True)
class Tally:
    """A digest of (epoch, sample) pairs, each as often as it occurs.

    Each pair is mixed to two words of 64 bits, and equal words are added modulo 2^64. So tallies of the same pairs are
    equal however these were divided and in whatever order they came, and one pair more, less or other shows.
    """

    first: int = 0
    second: int = 0

    @classmethod
    def of(cls, epoch: int, samples: Sequence[int] | Indices) -> "Tally":
        indices = indices_of(samples)
        # Seven small operations: a step of a small model can spare a few microseconds a lane. What is added up are
        # products of a word with another part of itself, since sums of anything linear see only the sum of indices.
        spread = numpy.frombuffer(indices, _WORDS) * _SPREAD
        spread += _offset(epoch)
        high = spread >> _HALF
        first = spread.dot(high)
        high ^= spread
        return cls(int(first), int(high.dot(high)))

    @classmethod
    def of_order(cls, epoch: int, order: Indices) -> "Tally":
        return total(cls.of(epoch, order[start : start + _SLICE]) for start in range(0, len(order), _SLICE))

    @classmethod
    def of_all(cls, epoch: int, count: int) -> "Tally":
        """The tally of an epoch in which each of 0..count-1 is read once."""
        starts = range(0, count, _SLICE)
        return total(
            cls.of(epoch, numpy.arange(start, min(start + _SLICE, count), dtype=numpy.int64)) for start in starts
        )

    @classmethod
    def from_hex(cls, text: str) -> "Tally":
        """What `str` wrote."""
        if len(text) != _DIGITS:
            raise ValueError(f"a tally has {_DIGITS} hexadecimal digits, not {len(text)}: {text!r}")
        return cls(int(text[:16], 16), int(text[16:], 16))

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.first + other.first & _WORD, self.second + other.second & _WORD)

    def __str__(self) -> str:
        return f"{self.first:016x}{self.second:016x}"


NOTHING = Tally()
"""The tally of no samples."""


def total(tallies: Iterable[Tally]) -> Tally:
    """The tally of all their pairs together."""
    first = second = 0
    for tally in tallies:
        first += tally.first
        second += tally.second
    return Tally(first & _WORD, second & _WORD)


@lru_cache(maxsize=4)
def _offset(epoch: int) -> numpy.uint64:
    """Where an epoch begins among all words (splitmix64): the same sample counts for something else in another."""
    word = (epoch + 1) * 0xD1B54A32D192ED03 & _WORD
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = (word ^ word >> shift) * factor & _WORD
    return numpy.uint64(word ^ word >> 31)
