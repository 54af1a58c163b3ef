"""In which files the bad samples of a run lie."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy

from quorate.data.indices import Ranges
from quorate.data.shards.index import ShardIndex


@dataclass(frozen=True)
class BadPlace:
    """Samples from `first` to `last`, which are so many records of a file from `record` on."""

    first: int
    last: int
    file: str
    record: int

    @property
    def in_words(self) -> str:
        """The samples, the file, and which of its records they are."""
        if self.first == self.last:
            return f"sample {self.first}: record {self.record} of {self.file}"
        end = self.record + self.last - self.first
        return f"samples {self.first}-{self.last}: records {self.record}-{end} of {self.file}"


def bad_places(index: ShardIndex, ranges: Ranges) -> Iterator[BadPlace]:
    """Where these samples lie, one file after the other; what the index does not list is passed over."""
    begins = index.first[index.first_block]
    for first, last in ranges:
        while first <= min(last, len(index) - 1):
            shard = int(numpy.searchsorted(begins, first, side="right")) - 1
            end = min(last, int(begins[shard + 1]) - 1)
            yield BadPlace(first, end, index.shards[shard], first - int(begins[shard]))
            first = end + 1
