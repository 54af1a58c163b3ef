"""The files of a dataset in shards, in a folder or under a URL: listed, and read by ranges.

Trouble with reading is an OSError of a file and a `StoreError` of a store: it says nothing about the data.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from errno import ELOOP, ENOENT, ENOTDIR
from pathlib import Path
from stat import S_ISDIR, S_ISREG

from quorate.core.addresses import is_url
from quorate.core.errors import RequestError
from quorate.core.regular_file import open_regular
from quorate.shards.formats.format import ShardFile
from quorate.storage.objects import ObjectStore, open_store


class FolderPlace:
    """Shards in a folder and the folders below it, also those behind links."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def list(self) -> dict[str, int | None]:
        if not self._folder.exists():
            raise RequestError(f"{self._folder}: there is no such folder.")
        if not self._folder.is_dir():
            raise RequestError(
                f"{self._folder} is a file. Give the folder that it is in: an index is made of all shards in a folder."
            )
        found: dict[str, int | None] = {}
        # Each with the folders that it lies in, itself among them, as the file system knows them.
        folders = [("", frozenset([_identity(self._folder.stat())]))]
        while folders:
            below, above = folders.pop()
            for name, stat in self._entries(below):
                if stat is None:
                    found[name] = None
                elif S_ISREG(stat.st_mode):
                    found[name] = stat.st_size
                # A link to a folder that it lies in leads to nothing new, and on for ever.
                elif S_ISDIR(stat.st_mode) and (itself := _identity(stat)) not in above:
                    folders.append((f"{name}/", above | {itself}))
        return found

    def _entries(self, below: str) -> Iterator[tuple[str, os.stat_result | None]]:
        """What is in a folder, links followed; None for those that lead nowhere."""
        try:
            with os.scandir(self._folder / below) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    try:
                        stat = entry.stat()
                    except OSError as error:
                        if error.errno not in (ENOENT, ENOTDIR, ELOOP):
                            raise
                        stat = None
                    # What is neither there nor a link was removed meanwhile.
                    if stat is not None or entry.is_symlink():
                        yield f"{below}{entry.name}", stat
        except OSError as error:
            raise RequestError(f"{self._folder / below} cannot be listed: {error.strerror}.") from None

    @contextmanager
    def open(self, name: str, size: int | None = None) -> Iterator[ShardFile]:  # noqa: ARG002 (a file tells its size)
        descriptor = open_regular(self._folder / name)

        def read(start: int, length: int) -> bytes:
            content = os.pread(descriptor, length, start)
            while len(content) < length:
                # One call reads at most 2 GiB, and less from some file systems.
                more = os.pread(descriptor, length - len(content), start + len(content))
                if not more:
                    break
                content += more
            return content

        try:
            yield ShardFile(name, os.fstat(descriptor).st_size, read)
        finally:
            os.close(descriptor)


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


class StorePlace:
    """Shards under a URL. One thread alone lists it, or reads from it, first: that opens the store for all others."""

    def __init__(self, url: str) -> None:
        self._store = open_store(url)
        self._own = threading.local()

    def list(self) -> dict[str, int | None]:
        keys = self._store.list().items()
        return {key: each.bytes for key, each in keys if not any(part.startswith(".") for part in key.split("/"))}

    @contextmanager
    def open(self, name: str, size: int | None = None) -> Iterator[ShardFile]:
        total = self._store_here.size(name) if size is None else size

        def read(start: int, length: int) -> bytes:
            length = min(length, total - start)
            # A store refuses a range that begins behind the end, in words of its own.
            return self._store_here.read(name, start, length) if length > 0 else b""

        yield ShardFile(name, total, read)

    @property
    def _store_here(self) -> ObjectStore:
        """The store for this thread. A library that works in one event loop, such as that of S3, takes calls from any
        thread and shares its connections; others have one connection, which two threads must not use at once."""
        if self._store.serves_threads:
            return self._store
        if not hasattr(self._own, "store"):
            self._own.store = open_store(self._store.url)
        own: ObjectStore = self._own.store
        return own


ShardPlace = FolderPlace | StorePlace
"""Where shards lie. `list` gives all files, hidden ones left out, by name relative to the place; with their sizes, None
for a link that leads nowhere. `open` opens one, whose size need not be asked again where it is given. May be used by
several threads."""


def shard_place(place: str) -> ShardPlace:
    """The folder or URL of shards."""
    return StorePlace(place) if is_url(place) else FolderPlace(Path(place))
