"""Which samples went into a step, as a digest that adds up: over lanes, steps and epochs, in any order."""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy

from quorate.data.indices import NO_INDICES, Indices

_WORD = (1 << 64) - 1
_WORDS = numpy.dtype(numpy.uint64)
_SPREAD = numpy.uint64(0x9E3779B97F4A7C15)
_HALF = numpy.uint64(32)
_DIGITS = 32
_MOST_ADDENDS = 64
# So many at once: the words of a large training set would take several times the memory of its order.
_SLICE = 1 << 20


class Tally:
    """A digest of (epoch, sample) pairs, each as often as it occurs.

    Each pair is mixed to two words of 64 bits, and equal words are added modulo 2^64. So tallies of the same pairs are
    equal however these were divided and in whatever order they came, and one pair more, less or other shows.

    They are made when somebody asks for them: those of several steps at once take a fraction of the time that each of
    them would take within its step.
    """

    __slots__ = ("_addends", "_read", "_words")

    def __init__(
        self,
        words: tuple[int, int] | None = (0, 0),
        read: tuple[int, Indices] = (0, NO_INDICES),
        addends: "tuple[Tally, ...]" = (),
    ) -> None:
        self._words, self._read, self._addends = words, read, addends

    @classmethod
    def of(cls, epoch: int, samples: Sequence[int] | Indices) -> "Tally":
        """The tally of samples that were read in an epoch."""
        # A copy: their numbers may lie in the same memory as their batch, which would live as long as the tally.
        return cls(None, (epoch, numpy.array(samples, dtype=numpy.int64)))

    @property
    def words(self) -> tuple[int, int]:
        """Its digest."""
        # In this order: another thread may make it meanwhile, and then lets go of what it was made of.
        read, addends, words = self._read, self._addends, self._words
        if words is None:
            if addends:
                pairs = [tally.words for tally in addends]
                words = sum(first for first, _ in pairs) & _WORD, sum(second for _, second in pairs) & _WORD
            else:
                words = _mixed(*read)
            self._words = words
            self._read, self._addends = (0, NO_INDICES), ()
        return words

    @classmethod
    def of_order(cls, epoch: int, order: Indices | range) -> "Tally":
        """The tally of many samples, of which no copy is made as a whole."""
        return total(cls.of(epoch, order[start : start + _SLICE]) for start in range(0, len(order), _SLICE))

    @classmethod
    def from_hex(cls, text: str) -> "Tally":
        """What `str` wrote."""
        if len(text) != _DIGITS:
            raise ValueError(f"a tally has {_DIGITS} hexadecimal digits, not {len(text)}: {text!r}")
        return cls((int(text[:16], 16), int(text[16:], 16)))

    def __add__(self, other: "Tally") -> "Tally":
        addends = (*(self._addends or (self,)), *(other._addends or (other,)))
        if len(addends) > _MOST_ADDENDS:
            return total(addends)
        return Tally(None, addends=addends)

    def __eq__(self, other: object) -> bool:
        return self.words == other.words if isinstance(other, Tally) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.words)

    def __str__(self) -> str:
        first, second = self.words
        return f"{first:016x}{second:016x}"

    def __repr__(self) -> str:
        return f"Tally({self})"


NOTHING = Tally()
"""The tally of no samples."""


def total(tallies: Iterable[Tally]) -> Tally:
    """The tally of all their pairs together."""
    first = second = 0
    for tally in tallies:
        words = tally.words
        first += words[0]
        second += words[1]
    return Tally((first & _WORD, second & _WORD))


def _mixed(epoch: int, samples: Indices) -> tuple[int, int]:
    # What is added up are products of a word with another part of itself, since sums of anything linear see only the
    # sum of indices.
    spread = numpy.frombuffer(samples, _WORDS) * _SPREAD
    spread += _offset(epoch)
    high = spread >> _HALF
    first = spread.dot(high)
    high ^= spread
    return int(first), int(high.dot(high))


@lru_cache(maxsize=4)
def _offset(epoch: int) -> numpy.uint64:
    """Where an epoch begins among all words (splitmix64): the same sample counts for something else in another."""
    word = (epoch + 1) * 0xD1B54A32D192ED03 & _WORD
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = (word ^ word >> shift) * factor & _WORD
    return numpy.uint64(word ^ word >> 31)
