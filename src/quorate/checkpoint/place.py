"""A place for copies of one run's checkpoints: a folder of another disk or machine, or a prefix of an object store.

::

    PLACE/RUN/origin.json                       whose copies these are
    PLACE/RUN/job.yaml, environment.json,
              source.json                       what `quorate resume PLACE/RUN` needs beside them
    PLACE/RUN/step-00000200/manifest.json       the marker that commits: it is put last and removed first
    PLACE/RUN/step-00000200/0-of-1.….safetensors

A copy is there when its manifest is; whatever else lies there is no checkpoint, whenever its writer died.
"""

import contextlib
import os
import secrets
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from quorate.checkpoint.listing import REMOVING, CheckpointInfo, Skipped, cursor_of
from quorate.checkpoint.manifest import MANIFEST, Manifest, Part
from quorate.checkpoint.part_file import verify_part
from quorate.core.addresses import is_url
from quorate.core.errors import CheckpointError
from quorate.core.regular_file import opened_regular, read_regular
from quorate.storage.atomic import discard, move_into_place, put_in_place, sync_folder, write_atomically, write_new_file
from quorate.storage.objects import ObjectMissing, ObjectStore, StoreError, refuse_unknown_store

COPYING = ".copying-"
_FILE_URL = "file://"
_PIECE = 1 << 22

Files = Mapping[str, int]
"""The files of a checkpoint, with their sizes."""


@dataclass(frozen=True)
class Contents:
    """What a place has: whole checkpoints by their names; and what was begun and is not committed, by what `remove`
    takes for it, with the time of its last change, if that is known."""

    whole: Mapping[str, Files] = field(default_factory=dict)
    unfinished: Mapping[str, float | None] = field(default_factory=dict)


class Place(Protocol):
    """Where the copies of a run go. Used by one thread; raises `StoreError` where it cannot be used.

    Files are named as in the table above: ``job.yaml``, ``step-00000200/manifest.json``.
    """

    def contents(self) -> Contents:
        """What is there."""
        ...

    def put(self, info: CheckpointInfo) -> int:
        """Copy a checkpoint: its parts, each verified, and then the manifest; how many bytes that took.

        Raises `CheckpointError` if a part here is not what the manifest says: no copy is made of damage. A part that is
        not the same there is trouble of the place, and a `StoreError`.
        """
        ...

    def remove(self, name: str) -> None:
        """Remove a checkpoint, what is left of one that was not committed, or a small file."""
        ...

    def read(self, file: str) -> bytes | None:
        """The content of a small file; None where there is none."""
        ...

    def write(self, file: str, content: bytes) -> None:
        """Replace a small file."""
        ...

    def fetch(self, file: str, target: Path, size: int) -> None:
        """Write a file of about this size to a new one here. Raises `ObjectMissing` where there is none."""
        ...


def place_for(to: str, run: str) -> Place:
    """The place of a run below one that `checkpoint.to` names; a kind of store that is unknown is refused."""
    return place_at(f"{to.rstrip('/')}/{run}")


def place_at(address: str) -> Place:
    """The place with the address of the run's own folder or prefix."""
    if address.startswith(_FILE_URL):
        return FolderPlace(Path(address.removeprefix(_FILE_URL)))
    if not is_url(address):
        return FolderPlace(Path(address))
    refuse_unknown_store(address)
    return ObjectPlace(ObjectStore(address))


def files_of(manifest: Manifest) -> Files:
    """The parts of a checkpoint; its manifest is not among them."""
    return {part.file: part.bytes for part in manifest.parts}


class ObjectPlace:
    """A prefix of an object store, where there is no rename: the manifest is the commit."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def __str__(self) -> str:
        return str(self._store)

    def contents(self) -> Contents:
        """What is there."""
        files: dict[str, dict[str, int]] = {}
        changed: dict[str, float] = {}
        for key, stored in self._store.list().items():
            name, _, file = key.partition("/")
            if file and cursor_of(name) is not None:
                files.setdefault(name, {})[file] = stored.bytes
                changed[name] = max(changed.get(name, 0.0), stored.modified or 0.0)
        return Contents(
            whole={name: _parts(each) for name, each in sorted(files.items()) if MANIFEST in each},
            unfinished={name: changed[name] or None for name, each in sorted(files.items()) if MANIFEST not in each},
        )

    def put(self, info: CheckpointInfo) -> int:
        """Copy a checkpoint."""
        name, parts = info.path.name, info.manifest.parts
        there = self._files(name)
        missing = [part for part in parts if not _is_there(part, there)]
        if MANIFEST in there and any(part.file in there for part in missing):
            # It would be of other parts than it says, for as long as they are being replaced.
            self._store.remove(f"{name}/{MANIFEST}")
        with _reading(info):
            for part in missing:
                verify_part(info.path, part)
                self._store.put_file(f"{name}/{part.file}", info.path / part.file)
            content = read_regular(info.path / MANIFEST)
        self._refuse_incomplete(name, parts)
        self._store.put(f"{name}/{MANIFEST}", content)
        for file in there.keys() - files_of(info.manifest).keys() - {MANIFEST}:
            self._store.remove(f"{name}/{file}")
        return len(content) + sum(part.bytes for part in missing)

    def remove(self, name: str) -> None:
        """Remove a checkpoint, its manifest first: what is left then is none. Or a small file."""
        files = self._files(name)
        for file in sorted(files, key=lambda each: each != MANIFEST):
            self._store.remove(f"{name}/{file}")
        if not files:
            self._store.remove(name)

    def read(self, file: str) -> bytes | None:
        """The content of a small object."""
        try:
            return self._store.read(file)
        except ObjectMissing:
            return None

    def write(self, file: str, content: bytes) -> None:
        """Replace a small object."""
        self._store.put(file, content)

    def fetch(self, file: str, target: Path, size: int) -> None:
        """Write an object to a file."""
        self._store.fetch(file, target, size)

    def _files(self, name: str) -> dict[str, int]:
        listed = self._store.list().items()
        return {key.removeprefix(f"{name}/"): each.bytes for key, each in listed if key.startswith(f"{name}/")}

    def _refuse_incomplete(self, name: str, parts: tuple[Part, ...]) -> None:
        """Another may have taken for a leftover what is being put."""
        there = self._files(name)
        for part in parts:
            if there.get(part.file) != part.bytes:
                raise StoreError(
                    f"{self}: part {part.file} of {name} has {there.get(part.file, 0):,} bytes there and "
                    f"{part.bytes:,} here, just after it was copied. It is copied again."
                )


class FolderPlace:
    """A folder, where a checkpoint appears by one rename.

    The folder that it lies in must be there: it may be a mount point, and would be made on another disk.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __str__(self) -> str:
        return str(self._folder)

    def contents(self) -> Contents:
        """What is there."""
        whole, unfinished = {}, {}
        with self._explaining():
            for entry in sorted(self._folder.iterdir()) if self._folder.is_dir() else ():
                if entry.name.startswith((COPYING, REMOVING)):
                    unfinished[entry.name] = _last_change(entry)
                elif cursor_of(entry.name) is not None:
                    files = {file.name: file.stat().st_size for file in entry.iterdir()}
                    if MANIFEST in files:
                        whole[entry.name] = _parts(files)
                    else:
                        unfinished[entry.name] = _last_change(entry)
        return Contents(whole, unfinished)

    def put(self, info: CheckpointInfo) -> int:
        """Copy a checkpoint."""
        name, size = info.path.name, 0
        temporary = self._temporary(COPYING, name)
        try:
            self._make_folder()
            with self._explaining():
                temporary.mkdir()
            for file in [*files_of(info.manifest), MANIFEST]:
                with self._explaining(), contextlib.closing(_pieces(info, file)) as pieces:
                    size += write_new_file(temporary / file, pieces)
            for part in info.manifest.parts:
                self._verify(temporary, part, info)
            with self._explaining():
                sync_folder(temporary)
                put_in_place(temporary, self._folder / name, self._temporary(REMOVING, name))
        except BaseException:
            discard(temporary)
            raise
        return size

    def remove(self, name: str) -> None:
        """Remove a checkpoint: first from the list, in one move."""
        with self._explaining():
            doomed = self._folder / name
            if not name.startswith((COPYING, REMOVING)) and doomed.exists():
                doomed = self._temporary(REMOVING, name)
                move_into_place(self._folder / name, doomed)
            discard(doomed)

    def read(self, file: str) -> bytes | None:
        """The content of a small file."""
        with self._explaining():
            try:
                return read_regular(self._folder / file)
            except FileNotFoundError:
                return None

    def write(self, file: str, content: bytes) -> None:
        """Replace a small file."""
        self._make_folder()
        with self._explaining():
            write_atomically(self._folder / file, content)

    def fetch(self, file: str, target: Path, size: int) -> None:  # noqa: ARG002 (a Place)
        """Copy a file."""
        try:
            source = opened_regular(self._folder / file)
        except FileNotFoundError:
            raise ObjectMissing(f"{self}: there is no file {file}.") from None
        except OSError as error:
            raise self._explained(error) from error
        with source:
            write_new_file(target, iter(lambda: source.read(_PIECE), b""))

    def _temporary(self, purpose: str, name: str) -> Path:
        return self._folder / f"{purpose}{name}-{secrets.token_hex(4)}"

    def _make_folder(self) -> None:
        try:
            self._folder.mkdir(exist_ok=True)
        except FileNotFoundError:
            raise StoreError(
                f"{self._folder.parent}: there is no such folder. Mount it, or make it: were it made by itself, copies "
                "would go to the disk of the mount point while the right one is away.",
                lasts=True,
            ) from None
        except OSError as error:
            raise self._explained(error) from error

    def _verify(self, temporary: Path, part: Part, info: CheckpointInfo) -> None:
        """Read a part through as it lies there now: this finds damage of either side."""
        try:
            verify_part(temporary, part)
        except CheckpointError as error:
            verify_part(info.path, part)  # raises if it is not whole here, and it is not the place's fault
            raise StoreError(
                f"{self}: the copy of {info.path.name} is not what was written, although the checkpoint is whole: "
                f"{Skipped.of(temporary, error).reason}. Check the disk there, and that nobody else removes its files."
            ) from None

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._explained(error) from error

    def _explained(self, error: OSError) -> StoreError:
        return StoreError(f"{self}: {error.strerror or error}. Check that it is mounted, writable and not full.")


def _parts(files: Files) -> Files:
    return {file: size for file, size in files.items() if file != MANIFEST}


def _is_there(part: Part, there: Files) -> bool:
    """Whether a part need not be copied again: its name says its content, and an object appears whole."""
    digest = part.digest.partition(":")[2]
    return there.get(part.file) == part.bytes and bool(digest) and digest[:32] in part.file


@contextlib.contextmanager
def _reading(info: CheckpointInfo) -> Iterator[None]:
    """Trouble with the checkpoint itself is no trouble of the place: it may have been removed meanwhile."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"checkpoint {info.path}: {error.strerror or error}") from error


def _pieces(info: CheckpointInfo, file: str) -> Generator[bytes]:
    try:
        with opened_regular(info.path / file) as source:
            while piece := source.read(_PIECE):
                yield piece
    except OSError as error:
        raise CheckpointError(f"checkpoint {info.path}: {file}: {error.strerror or error}") from error


def _last_change(folder: Path) -> float | None:
    try:
        entries = [entry.stat() for entry in os.scandir(folder)] if folder.is_dir() else []
        return max((each.st_mtime for each in [folder.stat(), *entries]), default=None)
    except OSError:
        return None
