"""A file with the samples of a block: one behind the other as they were made, and at the end a table of them."""

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy
import xxhash

from quorate.core.regular_file import open_regular

_MAGIC = b"QRTSMPL2"
_ROW = numpy.dtype([("start", "<u8"), ("length", "<u8"), ("digest", "<u8")])
# Instead of where a sample begins: it was not made yet, or its record is bad.
_MISSING, _BAD = 2**64 - 1, 2**64 - 2


class Spool:
    """A block's file while it is written."""

    def __init__(self, path: Path, records: int) -> None:
        self.path = path
        self.left = records
        self.bytes = 0
        self._table = numpy.zeros(records, _ROW)
        self._table["start"] = _MISSING
        # Opened for each write: there are many of them, and samples of one block come now and then.
        self.path.touch(exist_ok=False)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing."""
        return self.left == 0

    def add(self, row: int, content: bytes | None) -> None:
        """A sample, or None for a bad one."""
        if self._table["start"][row] != _MISSING:
            return
        if content is None:
            self._table[row] = _BAD, 0, 0
        else:
            self._append(content)
            self._table[row] = self.bytes, len(content), xxhash.xxh3_64_intdigest(content)
            self.bytes += len(content)
        self.left -= 1

    def finish(self) -> None:
        """Write the table behind the samples."""
        table = self._table.tobytes()
        self._append(table + xxhash.xxh3_64_digest(table) + _MAGIC)

    def abandon(self) -> None:
        """Remove the file."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _append(self, content: bytes) -> None:
        # Never made anew: what was swept meanwhile has lost its beginning.
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        with os.fdopen(descriptor, "ab") as file:
            file.write(content)


class SampleFile:
    """A block's file that is complete."""

    def __init__(self, path: Path, descriptor: int, table: Any) -> None:
        self.path = path
        self._descriptor = descriptor
        self._table = table

    @classmethod
    def at(cls, path: Path, records: int) -> "SampleFile | None":
        """The file, if it is there and its table is sound."""
        size = records * _ROW.itemsize
        try:
            descriptor = open_regular(path)
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

    def is_bad(self, row: int) -> bool:
        """Whether no sample could be made of the record."""
        return bool(self._table["start"][row] == _BAD)

    def read(self, row: int) -> bytes | None:
        """The bytes of a sample; None if they are damaged."""
        start, length, digest = self._table[row].item()
        try:
            content = os.pread(self._descriptor, length, start)
        except OSError:
            return None
        return content if xxhash.xxh3_64_intdigest(content) == digest else None

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)
