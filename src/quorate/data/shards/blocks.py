"""The blocks of an index as a reader takes them: fetched, compared with the index, and opened."""

import contextlib
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
        found, shard = self._index.block(block), int(self._index.shard_of_block[block])

        def fetch() -> bytes:
            return self._fetch(shard, lambda file: self._format.read(file, found), self.size(block))

        try:
            return self._sound(str(block), lambda content: self._index.check(block, content), fetch)
        except DamagedBlock as error:
            places = f"{self._format.unit}s {found.start} to {found.start + found.length}"
            raise self._explained(error, shard, places) from None

    def _tail(self, shard: int) -> bytes:
        start, size = int(self._index.tails[shard]), int(self._index.sizes[shard])

        def fetch() -> bytes:
            return self._fetch(shard, lambda file: file.read(start, size - start), size - start)

        try:
            return self._sound(f"tail-{shard}", lambda content: self._index.check_tail(shard, content), fetch)
        except DamagedBlock as error:
            raise self._explained(error, shard, f"bytes {start} to {size}") from None

    def _sound(self, name: str, check: Callable[[bytes], None], fetch: Callable[[], bytes]) -> bytes:
        """From the cache, or fetched: twice where it differs from the index, since bytes may be lost on the way."""
        key = f"{self._index.digest}/{name}"
        cached = None if self._cache is None else self._cache.get(key)
        if cached is not None:
            with contextlib.suppress(DamagedBlock):
                check(cached)
                return cached
        content = fetch()
        try:
            check(content)
        except DamagedBlock:
            content = fetch()
            check(content)
        if self._cache is not None:
            self._cache.put(key, content)
        return content

    def _fetch(self, shard: int, read: _Read, length: int) -> bytes:
        name = f"{shown(self._index.place)}/{self._index.shards[shard]}"
        return self._fetcher.fetch(name, lambda: self._read(shard, read), length)

    def _read(self, shard: int, read: _Read) -> bytes:
        name, size = self._index.shards[shard], int(self._index.sizes[shard])
        # The first speaks alone: a store is opened when it is first used.
        with contextlib.nullcontext() if self._is_open else self._opening, self._place.open(name, size) as file:
            content = read(file)
            self._is_open = True
            return content

    # --- what is wrong

    def _explained(self, error: DamagedBlock, shard: int, places: str) -> DamagedBlock:
        why = f"digest {error.found}, and the index has {error.expected}; {self._change(shard)}"
        return DamagedBlock(error.file, places, error.expected, error.found, why)

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
