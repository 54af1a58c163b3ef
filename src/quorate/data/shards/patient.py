"""Shards that are read through: trouble that passes is tried again, and does not end the work of hours."""

import contextlib
from collections.abc import Iterator

from quorate.data.shards.fetching import Fetcher
from quorate.data.shards.files import OpenShard, ShardPlace
from quorate.data.shards.formats.format import ShardFile


class PatientShard:
    """An open shard; `Unreachable` where no try helps."""

    def __init__(self, file: OpenShard, fetcher: Fetcher) -> None:
        self.name = file.name
        self.size = file.size
        self._file = file
        self._fetcher = fetcher

    def read(self, start: int, length: int) -> bytes:
        """So many bytes from there, fewer only where the file ends."""
        return self._fetcher.fetch(self.name, lambda: self._file.read(start, length), length)


@contextlib.contextmanager
def opened(files: ShardPlace, name: str, size: int, fetcher: Fetcher) -> Iterator[ShardFile]:
    """A shard of so many bytes, until the `with` ends."""
    with files.open(name, size) as file:
        yield PatientShard(file, fetcher)
