"""The blocks of an index as a reader takes them: fetched, compared with the index, and opened."""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from quorate.core.addresses import is_url, shown
from quorate.data.shards.disk_cache import DiskCache
from quorate.data.shards.errors import DamagedBlock
from quorate.data.shards.fetching import Fetcher
from quorate.data.shards.files import shard_place
from quorate.data.shards.formats.format import Records, ShardFile
from quorate.data.shards.formats.kinds import format_of
from quorate.data.shards.index import Array, ShardIndex
from quorate.storage.objects import StoreError


class ShardBlocks:
    """Opens the blocks of an index, for one process; what a remote store gives is kept in the cache, if there is one.

    Its methods are called by several threads.
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
        self.size = index.block_bytes
        self.is_remote = is_url(index.place)
        self._cache = cache if self.is_remote else None
        self._fetcher = Fetcher(self.is_remote)
        self._place = shard_place(index.place)
        self._opening = threading.Lock()
        self._is_open = not self.is_remote

    def read(self, number: int) -> Records:
        """The records of a block, or what is wrong with it: `DamagedBlock`, `BadRecord`."""
        index, format, shard = self._index, self._format, int(self._index.shard_of_block[number])
        block, begin, size = index.block(number), int(index.tails[shard]), int(index.sizes[shard])

        def tail() -> bytes:
            digest, place = index.tail_digests[shard], f"bytes {begin} to {size}"
            return self._checked(
                f"tail-{shard}", shard, digest, place, lambda file: file.read(begin, size - begin), size - begin
            )

        place = f"{format.unit}s {block.start} to {block.start + block.length}"
        content = self._checked(
            str(number), shard, index.digests[number], place, lambda file: format.read(file, block), self.size(number)
        )
        return format.open(content, block, index.schema, tail, self._columns)

    def close(self) -> None:
        """End what waits for another try."""
        self._fetcher.close()

    def _checked(
        self, name: str, shard: int, digest: Array, place: str, read: Callable[[ShardFile], bytes], length: int
    ) -> bytes:
        """From the cache, or fetched: twice where it differs from the index, since bytes may be lost on the way."""
        key, expected, file = f"{self._index.digest}/{name}", digest.tobytes(), self._index.shards[shard]
        cached = None if self._cache is None else self._cache.get(key)
        if cached is not None and xxhash.xxh3_128_digest(cached) == expected:
            return cached
        for _ in range(2):
            content = self._fetcher.fetch(f"{shown(self._index.place)}/{file}", lambda: self._read(shard, read), length)
            found = xxhash.xxh3_128_digest(content)
            if found == expected:
                if self._cache is not None:
                    self._cache.put(key, content)
                return content
        why = f"digest {found.hex()}, and the index has {expected.hex()}; {self._change(shard)}"
        raise DamagedBlock(file, place, why)

    def _read(self, shard: int, read: Callable[[ShardFile], bytes]) -> bytes:
        name, size = self._index.shards[shard], int(self._index.sizes[shard])
        # The first speaks alone: a store is opened when it is first used.
        with contextlib.nullcontext() if self._is_open else self._opening, self._place.open(name, size) as file:
            content = read(file)
            self._is_open = True
            return content

    def _change(self, shard: int) -> str:
        """What has become of a file since it was indexed."""
        name, expected = self._index.shards[shard], int(self._index.sizes[shard])
        modified: float | None = None
        try:
            if self.is_remote:
                with self._place.open(name) as file:
                    size = file.size
            else:
                stat = os.stat(Path(self._index.place, name))  # noqa: PTH116 (all of it at once)
                size, modified = stat.st_size, stat.st_mtime
        except (OSError, StoreError):
            return "the file cannot be looked at any more"
        if size != expected:
            return f"the file has changed since it was indexed: {size:,} bytes, and it had {expected:,}"
        if modified is not None and self._indexed_at is not None and modified > self._indexed_at:
            return "the file has changed since it was indexed: it was written to later"
        return "the file has the size that was indexed, so it is damaged or was written over"
