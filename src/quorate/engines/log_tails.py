"""What is new in the logs of a folder, read while others write them."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quorate.storage.log_file import parts_of

AT_ONCE = 4 * 2**20
"""Bytes that are read at once."""


@dataclass(frozen=True)
class LogLines:
    """What a process of this host has logged: whole lines, for the log of that name."""

    log: str
    text: bytes


class LogTails:
    """Reads on where a log is full and followed by another file, also by several."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptors: dict[str, int] = {}
        self._partial: dict[str, bytes] = {}

    def read(self, limit: int) -> Iterator[LogLines]:
        """Whole lines, of so many bytes in all or a little more."""
        # One that has just become full has no file of its name until the next line.
        for name in sorted({path.stem for path in self._folder.glob("*.jsonl")} | self._descriptors.keys()):
            while limit > 0:
                # Looked for first: only a file that is followed by another is written no more, and ends where a read
                # after that finds nothing.
                following = self._following(name)
                descriptor = self._descriptors.get(name)
                data = b"" if descriptor is None else os.read(descriptor, AT_ONCE)
                if data:
                    limit -= len(data)
                    whole, end, rest = (self._partial.get(name, b"") + data).rpartition(b"\n")
                    self._partial[name] = rest
                    if end:
                        yield LogLines(name, whole + end)
                elif following is None:
                    break
                else:
                    self._go_on_with(name, *following)

    def _following(self, name: str) -> tuple[Path, int] | None:
        """The file after the one that is read, and its inode; the oldest where that was removed or there is none."""
        try:
            parts = [(part, part.stat().st_ino) for part in parts_of(self._folder / f"{name}.jsonl")]
        except OSError:  # they are being renamed: the next look finds them
            return None
        known = self._descriptors.get(name)
        inodes = [inode for _, inode in parts]
        read = None if known is None else os.fstat(known).st_ino
        after = parts[inodes.index(read) + 1 :] if read in inodes else parts
        return next(iter(after), None)

    def _go_on_with(self, name: str, path: Path, inode: int) -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        if os.fstat(descriptor).st_ino != inode:  # renamed since
            os.close(descriptor)
            return
        known = self._descriptors.get(name)
        if known is not None:
            os.close(known)
        self._descriptors[name] = descriptor

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
