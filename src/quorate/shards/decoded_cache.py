"""Samples that `decode` has made, kept on the disk by block: another epoch or another job reads them from there."""

import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import xxhash

from quorate.data.indices import Indices
from quorate.shards.disk_cache import DiskCache
from quorate.shards.sample_file import NotEncodable, SampleFile, Spool, decode, encode

log = logging.getLogger(__name__)

_OPEN, _SPOOLS = 128, 512
# What a process has unfinished takes at most so much of the cache.
_SHARE = 1 / 8
# Part of the name of all that is kept. Earlier versions of Quorate named samples by the code of decode().
_VERSION = "keyed-1"


class DecodedCache:
    """The samples of each block in one file, which is written as they are made and counts once all of them are in it.

    They are found by the data that they were made of and by `key`, with which the user says what `decode` makes of
    these. All of it is of one process: a forked child begins its own files.
    """

    def __init__(self, cache: DiskCache, data: str, key: str, records: Indices) -> None:
        self._cache = cache
        # Tensors are kept as this machine has them in memory.
        self._name = xxhash.xxh3_128_hexdigest(f"{_VERSION} {sys.byteorder} {data} {key}".encode())
        self._records = records
        self._is_on = True
        self._begin(os.getpid())

    def _begin(self, process: int) -> None:
        self._process = process
        # Of the batch that is being read; None between two of them.
        self._staged: list[tuple[int, int, bytes | None]] | None = None
        self._spools: OrderedDict[int, Spool] = OrderedDict()
        self._spooled = 0
        # Blocks that were given up, and how many of their rows are still to come: a file begun now would lack the rest.
        self._passing: dict[int, int] = {}
        self._open: OrderedDict[int, SampleFile | None] = OrderedDict()

    def _here(self) -> None:
        if self._process != os.getpid():
            self._begin(os.getpid())

    def _key(self, block: int) -> str:
        return f"{self._name}/samples-{block}"

    # --- reading

    def has(self, block: int) -> bool:
        return self._entry(block) is not None

    def get(self, block: int, row: int) -> tuple[bool, Any]:
        """Whether a sample is there, and the sample. A bad one is not: who decodes it again learns what is wrong."""
        entry = self._entry(block)
        if entry is None or entry.is_bad(row):
            return False, None
        content = entry.read(row)
        if content is None:
            log.warning("a file of the cache is damaged, and is made again: %s", entry.path)
            self._forget(block)
            return False, None
        return True, decode(content)

    def _entry(self, block: int) -> SampleFile | None:
        self._here()
        if block not in self._open:
            self._open[block] = SampleFile.at(self._cache.path(self._key(block)), int(self._records[block]))
            if (found := self._open[block]) is not None:
                self._cache.touch(found.path)
            while len(self._open) > _OPEN:
                _, oldest = self._open.popitem(last=False)
                if oldest is not None:
                    oldest.close()
        else:
            self._open.move_to_end(block)
        return self._open[block]

    def _forget(self, block: int) -> None:
        """Remove the file of a block, and look for no other before one was begun."""
        self._cache.remove(self._key(block))
        entry = self._open.get(block)
        if entry is not None:
            entry.close()
        self._open[block] = None

    # --- writing

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Around the reading of a batch: what is made in it may be kept. What is not settled by its end, as it was left
        by an exception, is not."""
        self._here()
        self._staged = []
        try:
            yield
        finally:
            self._staged = None

    def stage(self, block: int, row: int, sample: Any, is_bad: bool = False) -> None:
        """A sample that was made, or a record that none can be made of; it is kept when it is known that no random
        numbers were drawn for it."""
        if self._staged is None or not self._is_on:
            return
        try:
            self._staged.append((block, row, None if is_bad else encode(sample)))
        except NotEncodable as reason:
            self._end(f"they hold {reason}")

    def settle(self, drew: bool) -> None:
        """Keep what was staged, unless random numbers were drawn."""
        self._here()
        staged, self._staged = self._staged or [], None
        if not self._is_on:
            return
        if drew:
            self._end("decode() draws random numbers, so they differ in every epoch")
            return
        try:
            for block, row, content in staged:
                self._keep(block, row, content)
        except OSError as error:
            self._cache.fail(error)
        if self._cache.has_failed:
            self._end("the disk does not take them")

    def _keep(self, block: int, row: int, content: bytes | None) -> None:
        entry = self._entry(block)
        if entry is not None:
            if content is None or not entry.is_bad(row):
                return
            # What was bad is so no longer: a file without that mark has to be made.
            self._forget(block)
        spool = self._spools.get(block) or self._begun(block)
        if spool is None:
            return
        self._spools.move_to_end(block)
        try:
            before = spool.bytes
            spool.add(row, content)
            self._spooled += spool.bytes - before
            self._cache.wrote(spool.bytes - before)
            if not spool.left:
                spool.finish()
                del self._spools[block]
                self._spooled -= spool.bytes
                self._cache.place(spool.path, self._key(block))
                self._open.pop(block, None)
        except FileNotFoundError:  # swept, to make room
            self._give_up(block)
        while self._spools and (len(self._spools) > _SPOOLS or self._spooled > self._cache.limit * _SHARE):
            self._give_up(next(iter(self._spools)))

    def _begun(self, block: int) -> Spool | None:
        if block in self._passing:
            self._passing[block] -= 1
            if self._passing[block] <= 0:
                del self._passing[block]
            return None
        # Another process may have made it since this one looked.
        self._open.pop(block, None)
        if self._entry(block) is not None:
            return None
        spool = self._spools[block] = Spool(self._cache.temporary(self._key(block)), int(self._records[block]))
        return spool

    def _give_up(self, block: int) -> None:
        spool = self._spools.pop(block)
        self._spooled -= spool.bytes
        if spool.left:
            self._passing[block] = spool.left
        spool.abandon()

    def _end(self, why: str) -> None:
        self._cache.note(f"decoded samples are no longer cached: {why}")
        self._is_on = False
        self._staged = None
        self._drop_spools()

    def _drop_spools(self) -> None:
        for spool in self._spools.values():
            spool.abandon()
        self._spools.clear()
        self._spooled = 0

    def close(self) -> None:
        """Let go of files; what is not complete is lost."""
        self._drop_spools()
        self._passing.clear()
        for entry in self._open.values():
            if entry is not None:
                entry.close()
        self._open.clear()
