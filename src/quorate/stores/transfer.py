"""A run's checkpoints on their way to a further place, and back: each of the two is a `Place`.

With them go what `quorate resume` needs beside checkpoints, and whose they are.
"""

import contextlib
import json
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from quorate.checkpoint.listing import (
    CheckpointInfo,
    ForeignError,
    Search,
    Skipped,
    Unusable,
    cursor_of,
    read_manifest,
    survey,
)
from quorate.checkpoint.manifest import MANIFEST, Seal
from quorate.checkpoint.part_file import SEALED, verify_part
from quorate.checkpoint.retention import Retention, Watched
from quorate.checkpoint.selection import Foreign
from quorate.checkpoint.store import CheckpointFolder, cipher_of
from quorate.core.errors import CheckpointError, JobError, NewerFormatError, QuorateError, UntrustedError
from quorate.core.generation import Cursor
from quorate.core.regular_file import read_regular
from quorate.core.runs_folder import ORIGIN
from quorate.spec.job import JobSpec
from quorate.storage.atomic import discard
from quorate.storage.objects import ObjectMissing, StoreError
from quorate.storage.run_folder import RunFolder
from quorate.storage.task_files import read_source
from quorate.stores.place import FolderPlace, Place, files_of, last_change

SOURCE_PAGE = "source.json"
PAGES = ("job.yaml", "environment.json")
FETCHING = ".fetching-"
LEFT_BEHIND = 24 * 3600.0
"""Seconds since its last change after which an unfinished copy is nobody's any more."""


@dataclass(frozen=True)
class Source:
    """A run whose checkpoints are copied, and what its job says about which to keep.

    The source of its task is copied as well (`with_source`): in plain, so not beside encrypted checkpoints.
    """

    run: RunFolder
    retention: Retention
    watched: Watched
    with_source: bool = True

    @classmethod
    def of(cls, run: RunFolder, spec: JobSpec) -> "Source":
        rules = spec.checkpoint
        return cls(
            run,
            Retention(rules.keep, rules.keep_every),
            Watched.by(spec.model_dump(include={"evaluate"})),
            with_source=rules.source and rules.sealing is None,
        )

    @property
    def origin(self) -> bytes:
        """Tells this run from another of the same name, on another machine say."""
        return json.dumps({"run": self.run.name, "created": self.run.created.isoformat()}).encode() + b"\n"

    def pages(self) -> dict[str, bytes]:
        """What a copy of a run has beside checkpoints."""
        files = [file for file in (self.run.job_file, self.run.environment_file) if file.is_file()]
        pages = {file.name: read_regular(file) for file in files}
        kept = read_source(self.run.path) if self.with_source else None
        return pages if kept is None else {**pages, SOURCE_PAGE: kept.to_page()}


@dataclass(frozen=True)
class Copied:
    """A checkpoint that was copied."""

    name: str
    bytes: int
    seconds: float


def copy_checkpoints(source: Source, place: Place) -> tuple[Copied, ...]:
    """Copy what a place lacks of a run's checkpoints, the newest first, with what a resume needs beside them.

    Nothing is removed, and no copy is made of damage. Raises `StoreError` (with a remedy) for trouble with the place.
    """
    whole = [each for each in survey(source.run.checkpoints) if isinstance(each, CheckpointInfo)]
    if not whole:  # a run that has nothing to copy leaves no trace there
        return ()
    claim(source, place)
    there = place.contents().whole
    copied = []
    for info in reversed(whole):
        if there.get(info.path.name) != files_of(info.manifest):
            with contextlib.suppress(CheckpointError):
                copied.append(copy_one(info, place))
    return tuple(copied)


def claim(source: Source, place: Place) -> None:
    """Say whose copies these are, with what a resume needs; refuse a place that has those of another run."""
    present = place.read(ORIGIN)
    if present is None:
        place.write(ORIGIN, source.origin)
    elif present != source.origin:
        raise StoreError(
            f"{place}: there are copies of another run of that name ({_created(present)}). Choose another place with "
            "`checkpoint.to`, or another `name` for the job.",
            lasts=True,
        )
    for name, content in source.pages().items():
        if place.read(name) != content:
            place.write(name, content)
    if not source.with_source and place.read(SOURCE_PAGE) is not None:
        place.remove(SOURCE_PAGE)  # from before the checkpoints were encrypted, or the source was to stay at home


def copy_one(info: CheckpointInfo, place: Place) -> Copied:
    """Copy a checkpoint, and say what it took. Trouble with the checkpoint itself is no trouble of the place: it may
    have been removed meanwhile."""
    started = time.monotonic()
    name = info.path.name

    def explain(what: str, error: OSError) -> QuorateError:
        file = what.removeprefix(name).removeprefix("/")
        return CheckpointError(f"checkpoint {info.path}: {file and f'{file}: '}{error.strerror or error}")

    source = FolderPlace(info.path.parent, explain=explain)
    with source.explaining(f"{name}/{MANIFEST}"):
        content = read_regular(info.path / MANIFEST)
    try:
        size = place.receive(name, info.manifest, content, source)
    except CheckpointError as error:
        for part in info.manifest.parts:
            verify_part(info.path, part)  # raises if it is not whole here, and it is not the place's fault
        raise StoreError(
            f"{place}: the copy of {name} is not what was written, although the checkpoint is valid: {error.message}. "
            "Check the disk there, and that nobody else removes its files."
        ) from None
    return Copied(name, size, round(time.monotonic() - started, 3))


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
        raise CheckpointError(f"{place}: {ORIGIN} names a run {origin.run!r}, which is not the name of a folder")
    return origin


def encrypted_at(place: Place) -> str | None:
    """The newest checkpoint at a place that has an encrypted part; none is read."""
    whole = place.contents().whole
    return next((name for name in reversed([*whole]) if any(file.endswith(SEALED) for file in whole[name])), None)


def fetch_newest(
    place: Place,
    folder: Path,
    newer_than: Cursor | None = None,
    *,
    cipher: Seal | None = None,
    foreign: Foreign = lambda _: "",
) -> Search:
    """Bring the newest whole checkpoint into a folder, verified; and those newer ones that cannot be used.

    With `newer_than` only such ones are looked at. With a cipher, one that was not written with its key is passed over
    as a damaged one is: otherwise whoever can write there could block all the good ones by one of his own. So is one
    that is `foreign`, and a copy of one that was set aside in the folder.
    """
    sweep_fetching(folder)
    skipped: list[Skipped] = []
    distrusted = [(info.path.name, files_of(info.manifest)) for info in CheckpointFolder.at(folder).distrusted()]
    for name, files in reversed([*place.contents().whole.items()]):
        if newer_than is not None and (cursor_of(name) or newer_than) <= newer_than:
            break
        if (name, files) in distrusted:
            why = f"the copy of {name} at {place} is of a checkpoint that was set aside, since it may be wrong"
            skipped.append(Skipped.of(Path(name), CheckpointError(why)))
            continue
        try:
            return Search(fetch_checkpoint(place, name, folder, cipher, foreign), tuple(skipped))
        except NewerFormatError:
            raise  # not to go on from an earlier one unasked
        except (CheckpointError, ObjectMissing) as error:
            skipped.append(Skipped.of(Path(name), error))
    return Search(None, tuple(skipped))


def fetch_checkpoint(
    place: Place, name: str, folder: Path, cipher: Seal | None = None, foreign: Foreign = lambda _: ""
) -> CheckpointInfo:
    """Bring one checkpoint into a folder; it appears there when all of it was verified, with a cipher under its key.

    One that has its name, such as a damaged one, makes room for it.
    """
    content = place.read(f"{name}/{MANIFEST}")
    if content is None:
        raise CheckpointError(f"{place}: {name} has no {MANIFEST}")
    remedy = ""
    try:
        info = CheckpointInfo(folder / name, read_manifest(folder / name, content))
        if cipher is not None:
            cipher_of(info.manifest, cipher)
        elif info.manifest.encryption is not None:  # whatever its parts are called
            raise UntrustedError("it is encrypted, and no key is given")
        if why := foreign(info):
            raise ForeignError(why)
        here_at(folder).receive(name, info.manifest, content, place)
    except CheckpointError as error:
        left = Skipped.of(folder / name, error)
        what = "is not whole: " if left.kind is Unusable.DAMAGED else f"{left.kind}: "
        if left.kind is Unusable.NEWER:
            what, remedy = "", ". Resume with that version."
        raise type(error)(f"the copy of {name} at {place} {what}{left.reason}{remedy}") from None
    return info


def here_at(folder: Path) -> FolderPlace:
    """A folder of a run that is fetched, as a place."""

    def explain(_: str, error: OSError) -> QuorateError:
        return JobError(
            f"cannot write a fetched checkpoint into {folder}: {error.strerror or error}. Make room or the folder "
            "writable, or choose another with --runs."
        )

    return FolderPlace(folder, temporary=FETCHING, explain=explain)


def sweep_fetching(folder: Path) -> None:
    """Remove what a fetch that died has left in a folder, when it has not changed for a day."""
    for entry in folder.glob(f"{FETCHING}*"):
        changed = last_change(entry)
        if changed is not None and time.time() - changed > LEFT_BEHIND:
            discard(entry)


def _created(origin: bytes) -> str:
    try:
        return f"created {json.loads(origin)['created']}"
    except (ValueError, KeyError, TypeError):
        return "its origin.json cannot be read"
