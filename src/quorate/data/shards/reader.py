"""Blocks of shards, read ahead by threads. What they do is Quorate's own: code of the task never runs in one."""

import contextlib
import copy
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import monotonic
from typing import Any

from quorate.data.shards.blocks import ShardBlocks
from quorate.data.shards.errors import ShardError
from quorate.data.shards.threads import CHECK_EVERY, check_interrupted, start_helper

log = logging.getLogger(__name__)

LIMIT = 160_000_000
"""Bytes of blocks that a process keeps, unless what it reads at the same time is more."""
_LOCAL_THREADS, _REMOTE_THREADS = 2, 8
_JOIN = 5.0


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


@dataclass(slots=True)
class _Kept:
    content: Any
    error: ShardError | None
    bytes: int
    used: int = 0


@dataclass(slots=True)
class _Reading:
    """A block that is being read, and by whom."""

    thread: threading.Thread
    bytes: int
    error: BaseException | None = None


class KeptBlocks:
    """Gives blocks, and fetches those ahead that it was told of. One thread gets and one tells, or one does both."""

    def __init__(self, blocks: ShardBlocks) -> None:
        self.limit = LIMIT
        self.threads: list[threading.Thread] = []
        self._blocks = blocks
        self._kept: dict[int, _Kept] = {}
        self._readings: dict[int, _Reading] = {}
        self._wanted: dict[int, None] = {}
        self._failed: set[int] = set()
        self._changed = threading.Condition()
        self._uses = itertools.count(1)
        self._raw = self._opened = 0
        self._over = self._warned = False

    # --- for whoever reads

    def get(self, block: int) -> Any:
        """A block's records: at once if they are kept, otherwise as soon as they are read."""
        kept = self._kept.get(block) or self._obtained(block)
        kept.used = next(self._uses)
        if kept.error is not None:
            # A new one each time: an exception gathers the frames that it has passed.
            raise copy.copy(kept.error)
        return kept.content

    def prefetch(self, blocks: Iterable[int]) -> None:
        """Which blocks come next, in order, with those that are in use; what was wanted before is so no longer."""
        wanted = dict.fromkeys(blocks)
        with self._changed:
            self._wanted = wanted
            self._failed.intersection_update(wanted)
            most = _REMOTE_THREADS if self._blocks.is_remote else _LOCAL_THREADS
            missing = sum(block not in self._kept for block in wanted)
            while len(self.threads) < min(most, missing):
                self.threads.append(start_helper(self._work, "shard-reader"))
            self._changed.notify_all()

    @property
    def nbytes(self) -> int:
        return sum(kept.bytes for kept in self._kept.values())

    def close(self, process: int) -> None:
        if os.getpid() != process:
            return  # a child that was forked has none of these threads, and their locks may be held for ever
        self._blocks.close()
        with self._changed:
            self._over = True
            self._kept.clear()
            self._changed.notify_all()
        over = monotonic() + _JOIN
        for thread in self.threads:
            thread.join(max(0.0, over - monotonic()))

    def _obtained(self, block: int) -> _Kept:
        with self._changed:
            while True:
                if (kept := self._kept.get(block)) is not None:
                    return kept
                reading = self._readings.get(block)
                if reading is None or not reading.thread.is_alive():
                    reading = self._begun(block)
                    break
                self._changed.wait(CHECK_EVERY)
                if reading.error is not None:
                    raise reading.error
                check_interrupted()
        return self._read(block, reading)

    # --- reading

    def _begun(self, block: int) -> _Reading:
        reading = self._readings[block] = _Reading(threading.current_thread(), self._expected(block))
        return reading

    def _expected(self, block: int) -> int:
        """What a block takes when it is open: as much more than its bytes as those before."""
        size = self._blocks.size(block)
        return size if not self._raw else int(size * self._opened / self._raw)

    def _read(self, block: int, reading: _Reading) -> _Kept:
        kept: _Kept | None = None
        try:
            kept = self._tried(block)
        except BaseException as error:
            reading.error = error
            raise
        finally:
            with self._changed:
                self._readings.pop(block, None)
                if kept is not None and not self._over:
                    kept.used = next(self._uses)
                    self._kept[block] = kept
                    self._failed.discard(block)
                    self._make_room(0, but=block)
                elif kept is None:
                    self._failed.add(block)
                self._changed.notify_all()
        return kept

    def _tried(self, block: int) -> _Kept:
        size = self._blocks.size(block)
        try:
            content = self._blocks.read(block)
        except ShardError as error:
            # Kept, like a sound one: each of its samples asks for it.
            return _Kept(None, error.with_traceback(None), 0)
        taken = max(size, int(getattr(content, "nbytes", 0)))
        with self._changed:
            self._raw += size
            self._opened += taken
        return _Kept(content, None, taken)

    def _make_room(self, needed: int, but: int | None = None) -> bool:
        """Forget what nobody wants, the longest unused first; whether there is room then for so much more."""
        excess = self.nbytes + sum(reading.bytes for reading in self._readings.values()) + needed - self.limit
        if excess <= 0:
            return True
        unwanted = [block for block in self._kept if block not in self._wanted and block != but]
        for block in sorted(unwanted, key=lambda block: self._kept[block].used):
            excess -= self._kept.pop(block).bytes
            if excess <= 0:
                return True
        if needed == 0 and not self._warned:
            self._warned = True
            log.warning(
                "what is read at the same time takes %.0f MB, more than the %.0f MB that are meant for it: smaller "
                "blocks (of Parquet: row groups) or a smaller window of quorate.Shards need less memory",
                self.nbytes / 1e6,
                self.limit / 1e6,
            )
        return False

    # --- ahead

    def _work(self) -> None:
        while True:
            with self._changed:
                while (block := self._next()) is None and not self._over:
                    self._changed.wait()  # for what is wanted to change, for room, or for the end
                if block is None or self._over:
                    return
                reading = self._begun(block)
            # Whoever needs the block reads it again, and learns what is wrong.
            with contextlib.suppress(Exception):
                self._read(block, reading)

    def _next(self) -> int | None:
        """The first block that is wanted and not here, if there is room for it."""
        for block in self._wanted:
            if block not in self._kept and block not in self._readings and block not in self._failed:
                return block if self._make_room(self._expected(block)) else None
        return None
