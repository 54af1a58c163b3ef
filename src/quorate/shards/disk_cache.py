"""A folder of files that may be made again at any time, kept below a size; several processes may share it."""

import contextlib
import logging
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from quorate.core.errors import RequestError
from quorate.core.regular_file import read_regular
from quorate.storage.atomic import is_abandoned, temporary_of
from quorate.storage.fencing import FolderInUse, hold

log = logging.getLogger(__name__)

NAME = "quorate-cache"
"""The folder of the cache's own, in the one that it was given: whatever else lies there is left alone."""
# The first line is what programs that make backups look for: https://bford.info/cachedir
_MARKER = "CACHEDIR.TAG"
_SIGNATURE = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# What Quorate has read from a store, and samples that it has decoded. All of it may be removed at any time.\n"
)

_DIGEST = 16
_LOCK = ".lock"
_KEY = re.compile(r"[0-9a-z]+/[0-9a-z-]+")
_KEPT = ".kept"
_ENTRY = re.compile(r"[0-9a-z-]+\.kept")
_PARTIAL = re.compile(r"\.[0-9a-z-]+\.kept\.[0-9a-f]+-[0-9]+-[0-9a-f]+\.partial")
# So much of the limit is written before the folder is looked through again, and so full it is left then.
_LOOK_EVERY, _LEAVE = 1 / 32, 0.9
_TOUCH_EVERY = 60.0


class DiskCache:
    """Bytes by key, with a digest behind each; what was used last is kept.

    A key is two words with a slash between them. Trouble with the disk is never the job's: what cannot be read counts
    as not there, and what cannot be written is not kept.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder / NAME
        self.limit = limit
        self._written = limit  # nobody knows yet how full it is
        self.has_failed = False
        self.notes: list[str] = []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(f"The cache folder {self.folder} cannot be made: {error.strerror}.") from None
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise RequestError(f"The cache folder {self.folder} cannot be written to.")
        marker = self.folder / _MARKER
        try:
            # Looked for twice: another process may have marked it meanwhile.
            if not marker.exists() and any(self.folder.iterdir()) and not marker.exists():
                raise RequestError(
                    f"{self.folder} has files in it and is not a cache of Quorate: name another folder, or move it "
                    "away."
                )
            with contextlib.suppress(FileExistsError), marker.open("x") as file:
                file.write(_SIGNATURE)
        except OSError as error:
            self.fail(error)

    def path(self, key: str) -> Path:
        """The file of a key, whether it is there or not."""
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key!r} is no key of a cache")
        return self.folder / f"{key}{_KEPT}"

    def get(self, key: str) -> bytes | None:
        """What was put there, if it is still there and undamaged."""
        path = self.path(key)
        try:
            content = read_regular(path)
        except OSError:
            return None
        if len(content) < _DIGEST or xxhash.xxh3_128_digest(content[:-_DIGEST]) != content[-_DIGEST:]:
            self.remove(key)
            return None
        self.touch(path)
        return content[:-_DIGEST]

    def put(self, key: str, content: bytes) -> None:
        """Keep it, if there is room: whole or not at all."""
        if len(content) + _DIGEST > self.limit or self.has_failed:
            return
        path = self.path(key)
        temporary = temporary_of(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("xb") as file:
                file.write(content)
                file.write(xxhash.xxh3_128_digest(content))
            # Without a sync: after a power cut its digest shows what is missing, and it is made again.
            with contextlib.suppress(FileNotFoundError):  # swept meanwhile
                temporary.replace(path)
        except OSError as error:
            self.fail(error)
            _unlink(temporary)
            return
        self._written += len(content) + _DIGEST
        if self._written >= self.limit * _LOOK_EVERY:
            self._written = 0
            self._make_room()

    def remove(self, key: str) -> None:
        _unlink(self.path(key))

    def touch(self, path: Path) -> None:
        """Tell all processes that it is in use."""
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _TOUCH_EVERY:
                os.utime(path)

    def fail(self, error: OSError) -> None:
        """Write no more."""
        if not self.has_failed:
            self.note(f"the cache {self.folder} is written to no longer: {error.strerror or error}")
        self.has_failed = True

    def note(self, what: str) -> None:
        """Say what is wrong, here in the log, and to whoever asks for the notes."""
        log.warning("%s", what)
        if what not in self.notes:
            self.notes.append(what)

    # --- making room

    def _make_room(self) -> None:
        """Remove what was unused for longest. One process at a time: others leave it to that one."""
        try:
            with hold(self.folder / _LOCK):
                self._sweep()
        except FolderInUse:
            return
        except OSError as error:
            # Whoever cannot make room must not fill it.
            self.fail(error)

    def _sweep(self) -> None:
        entries = []
        for file in self._files():
            if file.is_partial and is_abandoned(file.path.name, file.modified):
                _unlink(file.path)
            else:
                entries.append(file)
        used = sum(file.bytes for file in entries)
        if used > self.limit * (1 - _LOOK_EVERY):
            _remove([file for file in entries if not file.is_partial], used - self.limit * _LEAVE)

    def _files(self) -> Iterator["_File"]:
        """The files that the cache has made: by their names and places, and by no link to anywhere else."""
        with os.scandir(self.folder) as entries:
            folders = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
        for folder in folders:
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    partial = _PARTIAL.fullmatch(entry.name)
                    if partial is None and not _ENTRY.fullmatch(entry.name):
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        if entry.is_file(follow_symlinks=False):
                            stat = entry.stat()
                            # What it takes of the disk, which is more for small ones.
                            size = max(stat.st_size, stat.st_blocks * 512)
                            yield _File(stat.st_mtime, size, Path(entry.path), partial is not None)


@dataclass(frozen=True, order=True)
class _File:
    """A file of the cache; `is_partial`: unfinished."""

    modified: float
    bytes: int
    path: Path
    is_partial: bool = False


def _remove(files: list[_File], excess: float) -> None:
    """Remove the oldest of them until so many bytes are free."""
    for file in sorted(files):
        if excess <= 0:
            break
        _unlink(file.path)
        excess -= file.bytes


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
