"""The blocks of an index as a reader takes them: fetched, compared with the index, and opened."""

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from quorate.core.addresses import is_url, shown
from quorate.data.shards.disk_cache import DiskCache
from quorate.data.shards.errors import DamagedBlock
from quorate.data.shards.fetching import Fetcher
from quorate.data.shards.files import shard_place
from quorate.data.shards.formats.format import Records, ShardFile
from quorate.data.shards.formats.kinds import format_of
from quorate.data.shards.index import ShardIndex
from quorate.storage.objects import StoreError

_Read = Callable[[ShardFile], bytes]


class ShardBlocks:
    """Opens the blocks of an index, for one process; what a remote store gives is kept in the cache, if there is one.

    A block that differs from the index is read a second time: bytes may have been lost on the way.
    """

    def __init__(
        self,
        index: ShardIndex,
        indexed_at: float | None = None,
        columns: Sequence[str] | None = None,
        cache: DiskCache | None = None,
    ) -> None:
        self._index = index
        self._indexed_at = indexed_at
        self._columns = columns
        self._format = format_of(index.kind)
        self.is_remote = is_url(index.place)
        self._cache = cache if self.is_remote else None
        self._fetcher = Fetcher(self.is_remote)
        self._place = shard_place(index.place)
        self._opening = threading.Lock()
        self._is_open = not self.is_remote

    def size(self, block: int) -> int:
        """Bytes of a block, of those of its shard by its part of the records."""
        return block_bytes(self._index, block)

    def read(self, block: int) -> Records:
        """The records of a block, or what is wrong with it: `DamagedBlock`, `BadRecord`."""
        content = self._checked(block)
        shard = int(self._index.shard_of_block[block])
        return self._format.open(
            content, self._index.block(block), self._index.schema, lambda: self._tail(shard), self._columns
        )

    def close(self) -> None:
        """End what waits for another try."""
        self._fetcher.close()

    # --- bytes

    def _checked(self, block: int) -> bytes:
        key = f"{self._index.digest}/{block}"
        if (content := self._cached(key)) is not None and self._is_sound(block, content):
            return content
        shard = int(self._index.shard_of_block[block])
        content = self._bytes(shard, block)
        if not self._is_sound(block, content):
            content = self._bytes(shard, block)
            try:
                self._index.check(block, content)
            except DamagedBlock as error:
                raise self._explained(error, shard, block) from None
        self._keep(key, content)
        return content

    def _is_sound(self, block: int, content: bytes) -> bool:
        try:
            self._index.check(block, content)
        except DamagedBlock:
            return False
        return True

    def _tail(self, shard: int) -> bytes:
        key = f"{self._index.digest}/tail-{shard}"
        start = int(self._index.tails[shard])
        length = int(self._index.sizes[shard]) - start
        for content in (self._cached(key), None, None):
            given = self._fetched(shard, start, length) if content is None else content
            try:
                self._index.check_tail(shard, given)
            except DamagedBlock as error:
                wrong = error
                continue
            self._keep(key, given)
            return given
        raise self._explained(wrong, shard, None)

    def _bytes(self, shard: int, block: int) -> bytes:
        found = self._index.block(block)
        return self._fetcher.fetch(
            self._named(shard),
            lambda: self._read(shard, lambda file: self._format.read(file, found)),
            self.size(block),
        )

    def _fetched(self, shard: int, start: int, length: int) -> bytes:
        return self._fetcher.fetch(
            self._named(shard), lambda: self._read(shard, lambda file: file.read(start, length)), length
        )

    def _read(self, shard: int, read: _Read) -> bytes:
        if self._is_open:
            return self._read_open(shard, read)
        # The first speaks alone: a store is opened when it is first used.
        with self._opening:
            content = self._read_open(shard, read)
            self._is_open = True
            return content

    def _read_open(self, shard: int, read: _Read) -> bytes:
        with self._place.open(self._index.shards[shard], int(self._index.sizes[shard])) as file:
            return read(file)

    def _named(self, shard: int) -> str:
        return f"{shown(self._index.place)}/{self._index.shards[shard]}"

    # --- the cache

    def _cached(self, key: str) -> bytes | None:
        return None if self._cache is None else self._cache.get(key)

    def _keep(self, key: str, content: bytes) -> None:
        if self._cache is not None:
            self._cache.put(key, content)

    # --- what is wrong

    def _explained(self, error: DamagedBlock, shard: int, block: int | None) -> DamagedBlock:
        if block is None:
            start, end, unit = int(self._index.tails[shard]), int(self._index.sizes[shard]), "bytes"
        else:
            found = self._index.block(block)
            start, end, unit = found.start, found.start + found.length, f"{self._format.unit}s"
        why = f"digest {error.found}, and the index has {error.expected}; {self._change(shard)}"
        return DamagedBlock(error.file, f"{unit} {start} to {end}", error.expected, error.found, why)

    def _change(self, shard: int) -> str:
        expected = int(self._index.sizes[shard])
        try:
            size, modified = self._now(shard)
        except (OSError, StoreError):
            return "the file cannot be looked at any more"
        if size != expected:
            return f"the file has changed since it was indexed: {size:,} bytes, and it had {expected:,}"
        if modified is not None and self._indexed_at is not None and modified > self._indexed_at:
            return "the file has changed since it was indexed: it was written to later"
        return "the file has the size that was indexed, so it is damaged or was written over"

    def _now(self, shard: int) -> tuple[int, float | None]:
        name = self._index.shards[shard]
        if self.is_remote:
            with self._place.open(name) as file:
                return file.size, None
        stat = os.stat(Path(self._index.place, name))  # noqa: PTH116 (all of it at once)
        return stat.st_size, stat.st_mtime


def block_bytes(index: ShardIndex, block: int) -> int:
    """Bytes of a block; where blocks are counted in rows, as many as fall to its rows."""
    if index.kind != "hdf5":
        return int(index.length[block])
    shard = int(index.shard_of_block[block])
    first, behind = (int(index.first_block[each]) for each in (shard, shard + 1))
    rows = int(index.first[behind] - index.first[first])
    return int(index.sizes[shard]) * int(index.records[block]) // max(1, rows)
