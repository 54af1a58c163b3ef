"""A log of a run's folder: lines of JSON, in a file that is followed by another when it is full."""

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quorate.core.log_records import encoded
from quorate.core.regular_file import open_regular
from quorate.storage.atomic import write_fully

LIMIT = 16 * 2**20
KEPT = 4
"""Files of one log: the one that is written, and those before it."""


class LineFile:
    """A file that lines are appended to. One that was cut short, here or by a crash, is ended first: it costs one line
    instead of two."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._turn = threading.Lock()
        self._descriptor: int | None = None
        self._size = 0
        self._torn = False

    def _append(self, lines: bytes) -> None:
        if self._descriptor is None:
            self._descriptor = open_regular(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            self._size = os.fstat(self._descriptor).st_size
            self._torn = self._size > 0 and os.pread(self._descriptor, 1, self._size - 1) != b"\n"
        start = b"\n" if self._torn else b""
        self._torn = True
        self._size += write_fully(self._descriptor, start + lines)
        self._torn = False

    def _close(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


class LogFile(LineFile):
    """Appends records; one process at a time does. Trouble with the disk is nobody's: what could not be written is
    counted, and told in the log when it can be again."""

    def __init__(self, path: Path, fields: dict[str, Any] | None = None, limit: int = LIMIT, kept: int = KEPT) -> None:
        super().__init__(path)
        self.missing = 0
        self._fields = fields or {}
        self._limit = limit
        self._kept = kept

    def append(self, *lines: str) -> None:
        """Write lines; they are in the file when this returns, unless it could not be written."""
        with self._turn:
            try:
                if self.missing:
                    self._write([encoded(self._note())])
                    self.missing = 0
                self._write(lines)
            except OSError:
                self._close()
                self.missing += len(lines)

    def close(self) -> None:
        with self._turn:
            self._close()

    def _write(self, lines: Sequence[str]) -> None:
        self._append("".join(f"{line}\n" for line in lines).encode(errors="backslashreplace"))
        if self._size > self._limit:
            self._close()
            rotate(self.path, self._kept)

    def _note(self) -> dict[str, Any]:
        lost = f"{self.missing:,} lines are" if self.missing > 1 else "a line is"
        message = f"{lost} missing here: {self.path.name} could not be written"
        return {"time": round(time.time(), 6), "level": "warning", "message": message, **self._fields}


def rotate(path: Path, kept: int) -> None:
    """Make room for a new file: each becomes one older, and the oldest is removed."""
    older = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, kept))]
    older[-1].unlink(missing_ok=True)
    for newer, name in reversed(list(itertools.pairwise(older))):
        with contextlib.suppress(FileNotFoundError):
            newer.replace(name)


def parts_of(path: Path) -> Iterator[Path]:
    """The files of a log that are there, the oldest first."""
    numbered = path.parent.glob(f"{path.name}.*")
    older = {int(part.suffix[1:]): part for part in numbered if part.suffix[1:].isdigit()}
    yield from (older[number] for number in sorted(older, reverse=True))
    if path.exists():
        yield path
