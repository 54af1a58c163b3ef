"""Bringing a run back from a place that has copies of it: its job, and its newest checkpoint that is whole."""

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from quorate.checkpoint.cipher import Cipher
from quorate.checkpoint.copier import LEFT_BEHIND, ORIGIN, SOURCE_PAGE, cursor_in
from quorate.checkpoint.key import cipher_of
from quorate.checkpoint.listing import CheckpointInfo, Search, Skipped, Unusable, read_manifest
from quorate.checkpoint.manifest import MANIFEST, Manifest
from quorate.checkpoint.part_file import SEALED, verify_part
from quorate.checkpoint.place import Place
from quorate.core.errors import CheckpointError, JobError, NewerFormatError, UntrustedError
from quorate.core.generation import Cursor
from quorate.storage.atomic import discard, put_in_place, sync_folder, write_new_file
from quorate.storage.kept_source import SourcePage
from quorate.storage.objects import ObjectMissing

FETCHING = ".fetching-"
PAGES = ("job.yaml", "environment.json")


@dataclass(frozen=True)
class Origin:
    """Whose copies lie at a place: the run's name, and when it was created."""

    run: str
    created: datetime


def read_origin(place: Place) -> Origin | None:
    """Whose copies these are; None where there are none of any run."""
    content = place.read(ORIGIN)
    if content is None:
        return None
    try:
        fields = json.loads(content)
        origin = Origin(str(fields["run"]), datetime.fromisoformat(fields["created"]))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{place}: {ORIGIN} is damaged ({error}), so it cannot be known whose copies these are. Use another "
            "copy of the run."
        ) from None
    if Path(origin.run).name != origin.run or origin.run in ("", ".", ".."):
        raise CheckpointError(f"{place}: {ORIGIN} names a run {origin.run!r}, which is no name of a folder")
    return origin


def fetch_pages(place: Place, folder: Path) -> None:
    """Write what a run's folder has beside checkpoints into a folder; not the task's source, which is code."""
    with _explaining(folder):
        for name in PAGES:
            content = place.read(name)
            if content is not None:
                write_new_file(folder / name, [content])


def read_source_page(place: Place) -> SourcePage | None:
    """The task's source at a place, as whoever can write there left it: it is for the caller to say whether to keep it,
    since what is kept is imported."""
    content = place.read(SOURCE_PAGE)
    return None if content is None else SourcePage.read(content)


def encrypted_at(place: Place) -> str | None:
    """The newest checkpoint at a place that has an encrypted part; none is read."""
    whole = place.contents().whole
    found = (name for name, files in whole.items() if any(file.endswith(SEALED) for file in files))
    return max(found, key=cursor_in, default=None)


def fetch_newest(
    place: Place, folder: Path, newer_than: Cursor | None = None, *, cipher: Cipher | None = None
) -> Search:
    """Bring the newest whole checkpoint into a folder, verified; and those newer ones that cannot be used.

    With `newer_than` only such ones are looked at. With a cipher, one that was not written with its key is passed over
    as a damaged one is: otherwise whoever can write there could block all the good ones by one of his own.
    """
    sweep_fetching(folder)
    skipped: list[Skipped] = []
    for name in sorted(place.contents().whole, key=cursor_in, reverse=True):
        if newer_than is not None and cursor_in(name) <= newer_than:
            break
        try:
            return Search(fetch_checkpoint(place, name, folder, cipher), tuple(skipped))
        except NewerFormatError:
            raise  # not to go on from an earlier one unasked
        except (CheckpointError, ObjectMissing) as error:
            kind = Unusable.UNTRUSTED if isinstance(error, UntrustedError) else Unusable.DAMAGED
            skipped.append(Skipped(Path(name), error.message, kind))
    return Search(None, tuple(skipped))


def fetch_checkpoint(place: Place, name: str, folder: Path, cipher: Cipher | None = None) -> CheckpointInfo:
    """Bring one checkpoint into a folder; it appears there when all of it was verified, with a cipher under its key.

    One that has its name, such as a damaged one, makes room for it.
    """
    final = folder / name
    with _explaining(folder):
        temporary = folder / f"{FETCHING}{secrets.token_hex(4)}"
        try:
            temporary.mkdir(parents=True)
            manifest = _fetched(place, name, temporary / name, cipher)
            sync_folder(temporary / name)
            put_in_place(temporary / name, final, temporary / f"{name}-before")
        finally:
            discard(temporary)
    return CheckpointInfo(final, manifest)


def sweep_fetching(folder: Path) -> None:
    """Remove what a fetch that died has left in a folder, when it has not changed for a day."""
    for entry in folder.glob(f"{FETCHING}*"):
        if time.time() - _last_change(entry) > LEFT_BEHIND:
            discard(entry)


def _last_change(folder: Path) -> float:
    """Of anything in it; what is just being removed counts as of now."""
    try:
        return max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))
    except OSError:
        return time.time()


def _fetched(place: Place, name: str, target: Path, cipher: Cipher | None) -> Manifest:
    target.mkdir()
    content = place.read(f"{name}/{MANIFEST}")
    if content is None:
        raise CheckpointError(f"{place}: {name} has no {MANIFEST}")
    write_new_file(target / MANIFEST, [content])
    try:
        manifest = read_manifest(target)
        if cipher is not None:
            cipher_of(manifest, cipher)
        for part in manifest.parts:
            if Path(part.file).name != part.file:
                raise CheckpointError(f"part {part.file} is not inside the checkpoint")
            place.fetch(f"{name}/{part.file}", target / part.file, part.bytes)
            verify_part(target, part)
            _write_through(target / part.file)
    except CheckpointError as error:
        reason = error.message.removeprefix(f"checkpoint {target}: ")
        if isinstance(error, NewerFormatError):
            raise NewerFormatError(f"the copy of {name} at {place} {reason}. Resume with that version.") from None
        if isinstance(error, UntrustedError):
            raise UntrustedError(f"the copy of {name} at {place} cannot be trusted: {reason}") from None
        raise CheckpointError(f"the copy of {name} at {place} is not whole: {reason}") from None
    return manifest


def _write_through(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _explaining(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise JobError(
            f"cannot write a fetched checkpoint into {folder}: {error.strerror or error}. Make room or the folder "
            "writable, or choose another with --runs."
        ) from error
