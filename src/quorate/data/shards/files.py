"""The files of a dataset in shards, in a folder or under a URL: listed, and read by ranges.

Trouble with reading is an OSError of a file and a `StoreError` of a store: it says nothing about the data.
"""

import os
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from quorate.core.errors import RequestError
from quorate.storage.objects import ObjectStore, is_url


class OpenShard(Protocol):
    """A shard that is open for reading, until its `with` ends."""

    name: str
    size: int

    def read(self, start: int, length: int) -> bytes:
        """So many bytes from there, fewer only where the file ends."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class ShardPlace(Protocol):
    """Where shards lie. May be used by several threads."""

    def list(self) -> dict[str, int]:
        """All files, hidden ones left out, by name relative to the place; with their sizes."""
        ...

    def open(self, name: str, size: int | None = None) -> OpenShard:
        """Open a file. `size` is what a store was told of it, so that it need not be asked again."""
        ...


def shard_place(place: str) -> ShardPlace:
    """The folder or URL of shards."""
    return StorePlace(place) if is_url(place) else FolderPlace(Path(place))


class FolderPlace:
    """Shards in a folder and the folders below it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def list(self) -> dict[str, int]:
        """All files, by name."""
        if not self._folder.exists():
            raise RequestError(f"{self._folder}: there is no such folder.")
        if not self._folder.is_dir():
            raise RequestError(
                f"{self._folder} is a file. Give the folder that it is in: an index is made of all shards in a folder."
            )
        found: dict[str, int] = {}
        folders = [""]
        while folders:
            below = folders.pop()
            try:
                with os.scandir(self._folder / below) as entries:
                    for entry in entries:
                        if entry.name.startswith("."):
                            continue
                        name = f"{below}{entry.name}"
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(f"{name}/")
                        elif entry.is_file():
                            found[name] = entry.stat().st_size
            except OSError as error:
                raise RequestError(f"{self._folder / below} cannot be listed: {error.strerror}.") from None
        return found

    def open(self, name: str, size: int | None = None) -> OpenShard:  # noqa: ARG002 (a file tells its size itself)
        """Open a file."""
        return LocalShard(self._folder / name, name)


class LocalShard:
    """A file on this machine."""

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._descriptor).st_size

    def read(self, start: int, length: int) -> bytes:
        """Bytes from there; several threads may read at once."""
        content = os.pread(self._descriptor, length, start)
        while len(content) < length:
            # One call reads at most 2 GiB, and less from some file systems.
            more = os.pread(self._descriptor, length - len(content), start + len(content))
            if not more:
                break
            content += more
        return content

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)


class StorePlace:
    """Shards under a URL. It is listed first, by one thread: that opens the store for all that read."""

    def __init__(self, url: str) -> None:
        self._store = ObjectStore(url)

    def list(self) -> dict[str, int]:
        """All objects, by key."""
        keys = self._store.list().items()
        return {key: each.bytes for key, each in keys if not any(part.startswith(".") for part in key.split("/"))}

    def open(self, name: str, size: int | None = None) -> OpenShard:
        """An object."""
        return StoredShard(self._store, name, size)


class StoredShard:
    """An object of a store."""

    def __init__(self, store: ObjectStore, name: str, size: int | None = None) -> None:
        self.name = name
        self._store = store
        self.size = store.size(name) if size is None else size

    def read(self, start: int, length: int) -> bytes:
        """Bytes from there."""
        length = min(length, self.size - start)
        # A store refuses a range that begins behind the end, in words of its own.
        return self._store.read(self.name, start, length) if length > 0 else b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return
