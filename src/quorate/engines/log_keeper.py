"""Keeps the logs of a run from filling its disk, whatever a task prints."""

import contextlib
import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

LIMIT = 64 * 2**20
"""Bytes from which a log is cut."""
BEGINNING, END = 2**20, 8 * 2**20
"""Bytes that stay of it: how it began, and what was written last."""

_EVERY = 0.25


class LogKeeper:
    """Cuts a middle part out of every log that has grown too long.

    By whoever looks after the processes, not by a pipe that all they print would go through: a process that writes to
    a file never waits for anybody, and what it wrote last is there whoever dies. All of them append, so they go on at
    the new end.
    """

    def __init__(self, folder: Path, limit: int = LIMIT, beginning: int = BEGINNING, end: int = END) -> None:
        self._folder = folder
        self._limit = limit
        self._beginning = beginning
        self._end = end
        self._due = 0.0

    def keep(self, now: float) -> None:
        """Look at the logs, a few times a second at most."""
        if now < self._due:
            return
        self._due = now + _EVERY
        for path in self._folder.glob("*.log"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_size > self._limit:
                    self._cut(path)

    def _cut(self, path: Path) -> None:
        try:
            with path.open("r+b") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(size - self._end)
                kept = file.read(self._end)
                file.truncate(self._beginning)
            dropped = size - self._beginning - self._end
            note = f"\n--- {dropped} bytes were cut out here: the log was longer than {self._limit} bytes ---\n"
            # Appended as everybody does: what somebody writes just now is not overwritten.
            with path.open("ab", buffering=0) as file:
                file.write(note.encode() + kept)
        except OSError as error:
            log.warning("cannot cut %s, which grows large: %s", path, error.strerror)
