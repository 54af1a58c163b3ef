"""Samples that `decode` has made, kept on the disk by block: another epoch or another job reads them from there."""

import contextlib
import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import xxhash

from quorate.data.ledger import Indices
from quorate.data.shards.cache import DiskCache
from quorate.data.shards.code_identity import Unidentified, identity
from quorate.data.shards.sample_codec import NotEncodable, decode, encode

log = logging.getLogger(__name__)

_OPEN, _SPOOLS = 128, 512
_MAGIC = b"QRTSMPL1"
_ROW = numpy.dtype([("start", "<u8"), ("length", "<u8"), ("digest", "<u8")])
_MISSING = 2**64 - 1


class DecodedCache:
    """The samples of a block in one file: one behind the other as they were made, and at the end a table of them.

    A file is written as its samples are made, and counts once all of them are in it. All of it is of one process: a
    forked child begins its own files.
    """

    def __init__(self, cache: DiskCache, name: str, records: Indices) -> None:
        self._cache = cache
        self._name = name
        self._records = records
        self._begin(os.getpid())

    @classmethod
    def of(cls, cache: DiskCache, data: str, function: Callable[[Any], Any], records: Indices) -> "DecodedCache | None":
        """The samples that this function makes of these data; None if it cannot be told what it depends on."""
        try:
            code = identity(function)
        except (Unidentified, OSError) as reason:
            log.warning("decoded samples are not cached: decode() depends on %s, which may change unseen", reason)
            return None
        return cls(cache, xxhash.xxh3_128_hexdigest(f"{data} {code}".encode()), records)

    def _begin(self, process: int) -> None:
        self._process = process
        self._is_on = True
        self._staged: list[tuple[int, int, bytes]] = []
        self._spools: OrderedDict[int, _Spool] = OrderedDict()
        self._open: OrderedDict[int, _Entry | None] = OrderedDict()

    def _here(self) -> None:
        if self._process != os.getpid():
            self._begin(os.getpid())

    def _key(self, block: int) -> str:
        return f"{self._name}/{block}.samples"

    # --- reading

    def has(self, block: int) -> bool:
        """Whether all samples of a block are there."""
        return self._entry(block) is not None

    def get(self, block: int, row: int) -> tuple[bool, Any]:
        """Whether a sample is there, and the sample."""
        entry = self._entry(block)
        if entry is None:
            return False, None
        content = entry.read(row)
        if content is None:
            log.warning("a file of the cache is damaged, and is made again: %s", self._cache.folder / self._key(block))
            self._cache.remove(self._key(block))
            entry.close()
            self._open[block] = None
            return False, None
        return True, decode(content)

    def _entry(self, block: int) -> "_Entry | None":
        self._here()
        if block not in self._open:
            self._open[block] = _Entry.at(self._cache.folder / self._key(block), int(self._records[block]))
            if (found := self._open[block]) is not None:
                self._cache.touch(found.path)
            while len(self._open) > _OPEN:
                _, oldest = self._open.popitem(last=False)
                if oldest is not None:
                    oldest.close()
        else:
            self._open.move_to_end(block)
        return self._open[block]

    # --- writing

    def stage(self, block: int, row: int, sample: Any) -> None:
        """A sample that was made; it is kept when it is known that no random numbers were drawn for it."""
        self._here()
        if not self._is_on:
            return
        try:
            self._staged.append((block, row, encode(sample)))
        except NotEncodable as reason:
            self._end(f"they hold {reason}")

    def settle(self, drew: bool) -> None:
        """Keep what was staged, unless random numbers were drawn."""
        self._here()
        staged, self._staged = self._staged, []
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
            self._end("the disk does not take them")

    def _keep(self, block: int, row: int, content: bytes) -> None:
        spool = self._spools.get(block)
        if spool is None:
            spool = _Spool(self._cache.temporary(self._key(block)), int(self._records[block]))
            self._spools[block] = spool
            while len(self._spools) > _SPOOLS:
                self._spools.popitem(last=False)[1].abandon()
        spool.add(row, content)
        if spool.is_complete:
            del self._spools[block]
            self._cache.place(spool.path, self._key(block), spool.finish())
            self._open.pop(block, None)

    def _end(self, why: str) -> None:
        log.warning("decoded samples are not cached any more: %s", why)
        self._is_on = False
        self._staged = []
        self._drop_spools()

    def _drop_spools(self) -> None:
        for spool in self._spools.values():
            spool.abandon()
        self._spools.clear()

    def close(self) -> None:
        """Let go of files; what is not complete is lost."""
        self._here()
        self._drop_spools()
        for entry in self._open.values():
            if entry is not None:
                entry.close()
        self._open.clear()


class _Spool:
    """A block's file while it is written."""

    def __init__(self, path: Path, records: int) -> None:
        self.path = path
        self._table = numpy.zeros(records, _ROW)
        self._table["start"] = _MISSING
        self._left = records
        self._position = 0
        # Opened for each write: there are many of them, and samples of one block come now and then.
        self.path.touch(exist_ok=False)

    @property
    def is_complete(self) -> bool:
        return self._left == 0

    def add(self, row: int, content: bytes) -> None:
        if self._table["start"][row] != _MISSING:
            return
        with self.path.open("ab") as file:
            file.write(content)
        self._table[row] = self._position, len(content), xxhash.xxh3_64_intdigest(content)
        self._position += len(content)
        self._left -= 1

    def finish(self) -> int:
        table = self._table.tobytes()
        with self.path.open("ab") as file:
            file.write(table + xxhash.xxh3_64_digest(table) + _MAGIC)
        return self._position + len(table) + 16

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)


class _Entry:
    """A block's file that is complete."""

    def __init__(self, path: Path, descriptor: int, table: Any) -> None:
        self.path = path
        self._descriptor = descriptor
        self._table = table

    @classmethod
    def at(cls, path: Path, records: int) -> "_Entry | None":
        """The file, if it is there and its table is sound."""
        size = records * _ROW.itemsize
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            end = os.fstat(descriptor).st_size - size - 16
            tail = os.pread(descriptor, size + 16, end) if end >= 0 else b""
            table, digest, magic = tail[:size], tail[size : size + 8], tail[size + 8 :]
            if magic == _MAGIC and digest == xxhash.xxh3_64_digest(table):
                return cls(path, descriptor, numpy.frombuffer(table, _ROW))
        except OSError:
            pass
        os.close(descriptor)
        return None

    def read(self, row: int) -> bytes | None:
        """The bytes of a sample; None if they are damaged."""
        start, length, digest = self._table[row].item()
        try:
            content = os.pread(self._descriptor, length, start)
        except OSError:
            return None
        return content if xxhash.xxh3_64_intdigest(content) == digest else None

    def close(self) -> None:
        os.close(self._descriptor)
