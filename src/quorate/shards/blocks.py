"""Blocks of shards: fetched, compared with the index, opened, kept, and read ahead by threads.

What these threads do is Quorate's own: code of the task never runs in one.
"""

import contextlib
import copy
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from quorate.core.addresses import is_url, shown
from quorate.data.datasets import LIMIT
from quorate.data.threads import CHECK_EVERY, HelperThreads, check_interrupted
from quorate.shards.disk_cache import DiskCache
from quorate.shards.fetching import Fetcher
from quorate.shards.files import shard_place
from quorate.shards.formats.format import DamagedBlock, Records, ShardError, ShardFile
from quorate.shards.formats.kinds import format_of
from quorate.shards.index import Array, ShardIndex
from quorate.storage.objects import StoreError

log = logging.getLogger(__name__)

_LOCAL_THREADS, _REMOTE_THREADS = 2, 8
_JOIN = 5.0
_LASTING = (ShardError, type(None))
"""What a block that was read has raised, if anything: read again, it would be the same."""


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
            return "the file can no longer be read"
        if size != expected:
            return f"the file has changed since it was indexed: {size:,} bytes, and it had {expected:,}"
        if modified is not None and self._indexed_at is not None and modified > self._indexed_at:
            return "the file has changed since it was indexed: it was written to later"
        return "the file has the size that was indexed, so it is damaged or was written over"


class BlockReader:
    """The blocks that a process has of shards; a forked child begins with nothing kept, and with threads of its own.

    So blocks may be prefetched before a fork, and a child never waits for a thread that it does not have. `source`
    gives what opens them, anew in each process.
    """

    def __init__(self, source: Callable[[], ShardBlocks]) -> None:
        self._source = source
        self._process: int | None = None
        self._kept: KeptBlocks

    def here(self, limit: int = LIMIT) -> "KeptBlocks":
        """Those of this process, which keeps so many bytes of them from now on."""
        process = os.getpid()
        if self._process != process:
            self._kept = KeptBlocks(self._source())
            self._process = process
            # Also when the dataset is simply forgotten, and before the interpreter ends below a thread.
            self._ended = weakref.finalize(self, self._kept.close, process)
        self._kept.limit = limit
        return self._kept

    def close(self) -> None:
        """End the threads and forget what was read; whoever asks later begins anew."""
        if self._process == os.getpid():
            self._ended()
        self._process = None


class KeptBlocks:
    """Gives blocks, and fetches those ahead that it was told of. One thread gets and one tells, or one does both."""

    def __init__(self, blocks: ShardBlocks) -> None:
        self.limit = LIMIT
        self._blocks = blocks
        self._helpers = HelperThreads("shard-reader", _REMOTE_THREADS if blocks.is_remote else _LOCAL_THREADS)
        # What is read, is being read or is to be, the longest unused first; and what it takes, or may take.
        self._kept: dict[int, Future[Any]] = {}
        self._sizes: dict[int, int] = {}
        self._wanted: dict[int, None] = {}
        self._lock = threading.RLock()
        self._raw = self._opened = 0
        self._warned = False

    def get(self, block: int) -> Any:
        """A block's records: at once if they are kept, otherwise as soon as they are read."""
        with self._lock:
            kept = self._kept.pop(block, None)
            # What no thread has begun yet is sooner read here; what was out of reach ahead is tried again.
            is_own = kept is None or kept.cancel() or (kept.done() and not isinstance(kept.exception(), _LASTING))
            if kept is None or is_own:
                kept = Future()
                self._sizes[block] = self._expected(block)
            self._kept[block] = kept
        if is_own:
            self._read(block, kept)
        while not wait([kept], CHECK_EVERY).done:
            check_interrupted()
        if isinstance(error := kept.exception(), ShardError):
            # A new one each time: an exception gathers the frames that it has passed.
            raise copy.copy(error)
        return kept.result()

    def prefetch(self, blocks: Iterable[int]) -> None:
        """Which blocks come next, in order, with those that are in use; what was wanted before is so no longer."""
        begun: list[Callable[[], None]] = []
        with self._lock:
            self._wanted = dict.fromkeys(blocks)
            for block in self._wanted:
                if block not in self._kept:
                    if not self._make_room(self._expected(block)):
                        break
                    kept = self._kept[block] = Future()
                    self._sizes[block] = self._expected(block)
                    begun.append(partial(self._read_ahead, block, kept))
        for work in begun:
            self._helpers.submit(work)

    @property
    def threads(self) -> list[threading.Thread]:
        return self._helpers.threads

    @property
    def nbytes(self) -> int:
        return sum(self._sizes[block] for block, kept in self._kept.items() if kept.done())

    def close(self, process: int) -> None:
        if os.getpid() != process:
            return  # a child that was forked has none of these threads, and their locks may be held for ever
        self._blocks.close()
        with self._lock:
            self._wanted.clear()
            self._kept.clear()
        self._helpers.close(_JOIN)

    def _read_ahead(self, block: int, kept: Future[Any]) -> None:
        with self._lock:
            self._sizes[block] = self._expected(block)
            # What those before take may be known only now.
            if block not in self._wanted or not self._make_room(0, but=block, warns=False):
                if self._kept.get(block) is kept and kept.cancel():
                    del self._kept[block]
                return
        self._read(block, kept)

    def _read(self, block: int, kept: Future[Any]) -> None:
        if not kept.set_running_or_notify_cancel():
            return
        size, taken = self._blocks.size(block), 0
        trouble: BaseException | None = None
        try:
            found = self._blocks.read(block)
            taken = max(size, found.nbytes)
        except BaseException as error:
            trouble = error.with_traceback(None) if isinstance(error, ShardError) else error
        with self._lock:
            self._sizes[block] = taken
            self._raw += size if taken else 0
            self._opened += taken
            if trouble is None:
                kept.set_result(found)
            else:
                kept.set_exception(trouble)
            self._make_room(0, but=block)

    def _expected(self, block: int) -> int:
        """What a block takes when it is open: as much more than its bytes as those before."""
        size = self._blocks.size(block)
        return size if not self._raw else int(size * self._opened / self._raw)

    def _make_room(self, needed: int, but: int | None = None, *, warns: bool = True) -> bool:
        """Forget what nobody wants, the longest unused first; whether there is room then for so much more."""
        excess = sum(self._sizes[block] for block in self._kept) + needed - self.limit
        for block in [block for block, kept in self._kept.items() if kept.done()]:
            if excess > 0 and block not in self._wanted and block != but:
                del self._kept[block]
                excess -= self._sizes.pop(block)
        if excess > 0 and needed == 0 and warns and not self._warned:
            self._warned = True
            log.warning(
                "what is read at the same time takes %.0f MB, more than the %.0f MB that are meant for it: smaller "
                "blocks (of Parquet: row groups) or a smaller window of quorate.Shards need less memory",
                self.nbytes / 1e6,
                self.limit / 1e6,
            )
        return excess <= 0
