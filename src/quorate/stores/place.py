"""A place for copies of one run's checkpoints: a folder of another disk or machine, or a prefix of an object store.

::

    PLACE/RUN/origin.json                       whose copies these are
    PLACE/RUN/job.yaml, environment.json,
              source.json                       what `quorate resume PLACE/RUN` needs beside them
    PLACE/RUN/step-00000200/manifest.json       the marker that commits: it is put last and removed first
    PLACE/RUN/step-00000200/0-of-1.….safetensors

A copy is there when its manifest is; whatever else lies there is no checkpoint, whenever its writer died. A run's own
folder of checkpoints is such a place, too: to copy one out and to fetch it back is the same, with the two exchanged.
"""

import contextlib
import os
import secrets
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quorate.checkpoint.listing import REMOVING, Skipped, cursor_of, fetch_missing
from quorate.checkpoint.manifest import MANIFEST, Manifest, Part
from quorate.checkpoint.part_file import verify_part
from quorate.core.addresses import is_url
from quorate.core.errors import CheckpointError, QuorateError
from quorate.core.generation import Cursor
from quorate.core.regular_file import opened_regular, read_regular
from quorate.storage.atomic import discard, move_into_place, put_in_place, sync_folder, write_atomically, write_new_file
from quorate.storage.objects import ObjectMissing, ObjectStore, StoreError, open_store
from quorate.stores.objects import refuse_unknown_store

COPYING = ".copying-"
_FILE_URL = "file://"
_PIECE = 1 << 22

Files = Mapping[str, int]
"""The files of a checkpoint, with their sizes."""


@dataclass(frozen=True)
class Contents:
    """What a place has: whole checkpoints by their names, oldest first; and what was begun and is not committed, by
    what `remove` takes for it, with the time of its last change, if that is known."""

    whole: Mapping[str, Files] = field(default_factory=dict)
    unfinished: Mapping[str, float | None] = field(default_factory=dict)


class ObjectPlace:
    """A prefix of an object store, where there is no rename: the manifest is the commit."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def __str__(self) -> str:
        return str(self._store)

    def contents(self) -> Contents:
        files: dict[str, dict[str, int]] = {}
        changed: dict[str, float] = {}
        for key, stored in self._store.list().items():
            name, _, file = key.partition("/")
            if file and cursor_of(name) is not None:
                files.setdefault(name, {})[file] = stored.bytes
                changed[name] = max(changed.get(name, 0.0), stored.modified or 0.0)
        return Contents(_whole(files), {name: changed[name] or None for name in files if MANIFEST not in files[name]})

    def receive(self, name: str, manifest: Manifest, content: bytes, source: "FolderPlace") -> int:
        """Take over a checkpoint: its parts, each verified, and then the content of its manifest; how many bytes that
        took. Raises `CheckpointError` where a part is not what the manifest says: no copy is made of damage."""
        there = self._files(name)
        missing = [part for part in manifest.parts if not _is_there(part, there)]
        if MANIFEST in there and any(part.file in there for part in missing):
            # It would be of other parts than it says, for as long as they are being replaced.
            self._store.remove(f"{name}/{MANIFEST}")
        with source.explaining(name):
            for part in missing:
                verify_part(source.folder / name, part)
                self._store.put_file(f"{name}/{part.file}", source.folder / name / part.file)
        now = self._files(name)
        for part in manifest.parts:
            if now.get(part.file) != part.bytes:
                # Another may have taken for a leftover what is being put.
                raise StoreError(
                    f"{self}: part {part.file} of {name} has {now.get(part.file, 0):,} bytes there and "
                    f"{part.bytes:,} here, just after it was copied. It is copied again."
                )
        self._store.put(f"{name}/{MANIFEST}", content)
        for file in there.keys() - files_of(manifest).keys() - {MANIFEST}:
            self._store.remove(f"{name}/{file}")
        return len(content) + sum(part.bytes for part in missing)

    def remove(self, name: str) -> None:
        """Remove a checkpoint, what is left of one that was not committed, or a small file."""
        if not remove_below(self._store, name):
            self._store.remove(name)

    def read(self, file: str) -> bytes | None:
        try:
            return self._store.read(file)
        except ObjectMissing:
            return None

    def write(self, file: str, content: bytes) -> None:
        self._store.put(file, content)

    def fetch(self, file: str, target: Path, size: int) -> None:
        """Write a file of about this size to a new one on a disk, and through to it; trouble with that is an `OSError`.
        Raises `ObjectMissing` where there is none."""
        self._store.fetch(file, target, size)
        descriptor = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _files(self, name: str) -> dict[str, int]:
        listed = self._store.list().items()
        return {key.removeprefix(f"{name}/"): each.bytes for key, each in listed if key.startswith(f"{name}/")}


class FolderPlace:
    """A folder, where a checkpoint appears by one rename, under a name that begins with `temporary` until then.

    The folder that it lies in must be there: it may be a mount point, and would be made on another disk. `explain` says
    what trouble with a file or checkpoint in it means.
    """

    def __init__(
        self,
        folder: Path,
        *,
        temporary: str = COPYING,
        explain: Callable[[str, OSError], QuorateError] | None = None,
    ) -> None:
        self.folder = folder
        self._temporary = temporary
        self._explain = explain or self._trouble

    def __str__(self) -> str:
        return str(self.folder)

    def contents(self) -> Contents:
        files: dict[str, dict[str, int]] = {}
        unfinished = {}
        with self.explaining():
            for entry in sorted(self.folder.iterdir()) if self.folder.is_dir() else ():
                if entry.name.startswith((COPYING, REMOVING)):
                    unfinished[entry.name] = last_change(entry)
                elif cursor_of(entry.name) is not None:
                    with contextlib.suppress(FileNotFoundError):  # it is being removed
                        files[entry.name] = {file.name: file.stat().st_size for file in entry.iterdir()}
                        if MANIFEST not in files[entry.name]:
                            unfinished[entry.name] = last_change(entry)
        return Contents(_whole(files), unfinished)

    def receive(self, name: str, manifest: Manifest, content: bytes, source: "FolderPlace | ObjectPlace") -> int:
        temporary = self.folder / f"{self._temporary}{name}-{secrets.token_hex(4)}"
        try:
            self._make_folder()
            with self.explaining():
                temporary.mkdir()
                for part in manifest.parts:
                    source.fetch(f"{name}/{part.file}", temporary / part.file, part.bytes)
                    # As it lies here now: this finds damage of either side.
                    verify_part(temporary, part)
                write_new_file(temporary / MANIFEST, [content])
                sync_folder(temporary)
                put_in_place(temporary, self.folder / name, self.folder / f"{REMOVING}{name}-{secrets.token_hex(4)}")
        except CheckpointError as error:
            raise type(error)(Skipped.of(temporary, error).reason) from None
        finally:
            discard(temporary)
        return len(content) + sum(part.bytes for part in manifest.parts)

    def remove(self, name: str) -> None:
        with self.explaining():
            doomed = self.folder / name
            if not name.startswith((COPYING, REMOVING)) and doomed.exists():
                # From the list first, in one move.
                doomed = self.folder / f"{REMOVING}{name}-{secrets.token_hex(4)}"
                move_into_place(self.folder / name, doomed)
            discard(doomed)

    def read(self, file: str) -> bytes | None:
        with self.explaining():
            try:
                return read_regular(self.folder / file)
            except FileNotFoundError:
                return None

    def write(self, file: str, content: bytes) -> None:
        self._make_folder()
        with self.explaining():
            write_atomically(self.folder / file, content)

    def fetch(self, file: str, target: Path, size: int) -> None:
        fetch_missing((self.folder / file).parent, Path(file).name, size)
        with self.explaining(file):
            source = opened_regular(self.folder / file)

        def pieces() -> Generator[bytes]:
            with self.explaining(file):
                while piece := source.read(_PIECE):
                    yield piece

        with source, contextlib.closing(pieces()) as read:
            write_new_file(target, read)

    @contextlib.contextmanager
    def explaining(self, what: str = "") -> Iterator[None]:
        """For what is done with a file or checkpoint here."""
        try:
            yield
        except OSError as error:
            raise self._explain(what, error) from error

    def _make_folder(self) -> None:
        with self.explaining():
            try:
                self.folder.mkdir(exist_ok=True)
            except FileNotFoundError:
                raise StoreError(
                    f"{self.folder.parent}: there is no such folder. Mount it, or create it. It is not created "
                    "automatically, or copies would go to the disk of the mount point while the right one is missing.",
                    lasts=True,
                ) from None

    def _trouble(self, what: str, error: OSError) -> QuorateError:
        if isinstance(error, FileNotFoundError) and what:
            return ObjectMissing(f"{self}: there is no file {what}.")
        return StoreError(f"{self}: {error.strerror or error}. Check that it is mounted, writable and not full.")


Place = FolderPlace | ObjectPlace
"""Where the copies of a run go. Used by one thread; raises `StoreError` where it cannot be used. Files are named as in
the table above: ``job.yaml``, ``step-00000200/manifest.json``."""


def place_for(to: str, run: str) -> Place:
    """The place of a run below one that `checkpoint.to` names; a kind of store that is unknown is refused."""
    return place_at(f"{to.rstrip('/')}/{run}")


def place_at(address: str) -> Place:
    """The place with the address of the run's own folder or prefix."""
    if address.startswith(_FILE_URL) or not is_url(address):
        return FolderPlace(Path(address.removeprefix(_FILE_URL)))
    refuse_unknown_store(address)
    return ObjectPlace(open_store(address))


def files_of(manifest: Manifest) -> Files:
    """The parts of a checkpoint; its manifest is not among them."""
    return {part.file: part.bytes for part in manifest.parts}


def remove_below(store: ObjectStore, name: str) -> bool:
    """Remove all below a name, the manifest first: what is left then is no checkpoint. Whether there was anything."""
    found = [key for key in store.list() if key.startswith(f"{name}/")]
    for key in sorted(found, key=lambda each: not each.endswith(f"/{MANIFEST}")):
        store.remove(key)
    return bool(found)


def _whole(files: Mapping[str, Files]) -> dict[str, Files]:
    """Those that are committed, oldest first, without their manifests."""
    names = sorted((name for name in files if MANIFEST in files[name]), key=lambda name: cursor_of(name) or Cursor())
    return {name: {file: size for file, size in files[name].items() if file != MANIFEST} for name in names}


def _is_there(part: Part, there: Files) -> bool:
    """Whether a part need not be copied again: its name says its content, and an object appears whole."""
    digest = part.digest.partition(":")[2]
    return there.get(part.file) == part.bytes and bool(digest) and digest[:32] in part.file


def last_change(folder: Path) -> float | None:
    """Of anything in it; None where that cannot be known, as while it is being removed."""
    try:
        return max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))
    except OSError:
        return None
