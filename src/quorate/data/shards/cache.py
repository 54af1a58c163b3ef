"""A folder of files that may be made again at any time, kept below a size; several processes may share it."""

import contextlib
import logging
import os
import secrets
import time
from pathlib import Path

import xxhash

from quorate.core.errors import RequestError
from quorate.storage.lock import FolderInUse, hold

log = logging.getLogger(__name__)

_DIGEST = 16
_LOCK = ".lock"
_PARTIAL = ".partial"
# So much of the limit is written before the folder is looked through again, and so full it is left then.
_LOOK_EVERY, _LEAVE = 1 / 32, 0.9
_TOUCH_EVERY = 60.0
_ABANDONED = 3600.0


class DiskCache:
    """Bytes by key, with a digest behind each; what was used last is kept.

    Trouble with the disk is never the job's: what cannot be read counts as not there, and what cannot be written is
    not kept.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self._written = limit  # nobody knows yet how full it is
        self._has_failed = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(f"The cache folder {folder} cannot be made: {error.strerror}.") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise RequestError(f"The cache folder {folder} cannot be written to.")

    def get(self, key: str) -> bytes | None:
        """What was put there, if it is still there and undamaged."""
        path = self.folder / key
        try:
            content = path.read_bytes()
        except OSError:
            return None
        if len(content) < _DIGEST or xxhash.xxh3_128_digest(content[:-_DIGEST]) != content[-_DIGEST:]:
            self.remove(key)
            return None
        self.touch(path)
        return content[:-_DIGEST]

    def put(self, key: str, content: bytes) -> None:
        """Keep it, if there is room: whole or not at all."""
        if len(content) > self.limit or self._has_failed:
            return
        temporary = self.temporary(key)
        try:
            with temporary.open("xb") as file:
                file.write(content)
                file.write(xxhash.xxh3_128_digest(content))
        except OSError as error:
            self.fail(error)
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            return
        self.place(temporary, key, len(content) + _DIGEST)

    def remove(self, key: str) -> None:
        """Forget it."""
        with contextlib.suppress(OSError):
            (self.folder / key).unlink(missing_ok=True)

    # --- for files that are written piece by piece

    def temporary(self, key: str) -> Path:
        """A file that becomes the one of a key when it is placed; one that is abandoned is swept later."""
        path = self.folder / key
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
        return path.with_name(f".{path.name}.{secrets.token_hex(4)}{_PARTIAL}")

    def place(self, temporary: Path, key: str, size: int) -> None:
        """Give a temporary file its name, and make room if that is needed."""
        # Without a sync: after a power cut its digest shows what is missing, and it is made again.
        with contextlib.suppress(OSError):
            temporary.replace(self.folder / key)
        self._written += size
        if self._written >= self.limit * _LOOK_EVERY:
            self._written = 0
            self._make_room()

    def touch(self, path: Path) -> None:
        """Tell all processes that it is in use."""
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _TOUCH_EVERY:
                os.utime(path)

    def fail(self, error: OSError) -> None:
        """Write no more."""
        if not self._has_failed:
            log.warning("the cache %s is written to no longer: %s", self.folder, error.strerror)
        self._has_failed = True

    def _make_room(self) -> None:
        """Remove what was unused for longest. One process at a time: others leave it to that one."""
        try:
            with hold(self.folder / _LOCK):
                self._sweep()
        except (FolderInUse, OSError):
            return

    def _sweep(self) -> None:
        files: list[tuple[float, int, Path]] = []
        for path in self.folder.rglob("*"):
            with contextlib.suppress(OSError):
                stat = path.stat()
                if path.name.endswith(_PARTIAL):
                    if time.time() - stat.st_mtime > _ABANDONED:
                        path.unlink(missing_ok=True)
                elif path.is_file() and path.name != _LOCK:
                    files.append((stat.st_mtime, stat.st_size, path))
        excess = sum(size for _, size, _ in files) - self.limit * (1 - _LOOK_EVERY)
        if excess <= 0:
            return
        excess += self.limit * (1 - _LOOK_EVERY - _LEAVE)
        for _, size, path in sorted(files):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                excess -= size
            if excess <= 0:
                return
