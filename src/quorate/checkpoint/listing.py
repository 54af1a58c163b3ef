"""What is in a folder of checkpoints, by their names and manifests: no part is read."""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from pkgutil import resolve_name

from quorate.checkpoint.manifest import MANIFEST, MOST_INCARNATIONS, Manifest
from quorate.core.errors import CheckpointError, JobError, NewerFormatError, UntrustedError
from quorate.core.generation import Cursor, Phase
from quorate.core.regular_file import read_regular
from quorate.storage.run_folder import stored_by

WRITING = ".writing-"
"""How the name of a save on its way begins; that of a checkpoint says where in the job it was saved."""
REMOVING = ".removing-"
# With one zero too many it would be a second checkpoint of the same cursor.
_NAME = re.compile(r"step-(\d{8}|[1-9]\d{8,17})(-evaluated)?", re.ASCII)


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint as its manifest tells it; its parts have not been looked at."""

    path: Path
    manifest: Manifest

    @property
    def cursor(self) -> Cursor:
        return self.manifest.cursor

    @property
    def best(self) -> int | None:
        """The step of the best evaluation at that time, if there was any and the manifest tells."""
        return None if self.manifest.best is None else self.manifest.best["step"]

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.manifest.parts)


class Unusable(StrEnum):
    """Why a checkpoint is not for use; told after its name."""

    DAMAGED = "is damaged"
    NEWER = "is of a newer version"
    FOREIGN = "is not of this run"
    UNTRUSTED = "cannot be trusted"


class ForeignError(CheckpointError):
    """A checkpoint is none of the run that it is looked for."""


_KINDS: dict[type[JobError], Unusable] = {
    NewerFormatError: Unusable.NEWER,
    ForeignError: Unusable.FOREIGN,
    UntrustedError: Unusable.UNTRUSTED,
}


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that cannot be used, and why; the reason leaves out where, which the path says."""

    path: Path
    reason: str
    kind: Unusable = Unusable.DAMAGED

    @classmethod
    def of(cls, path: Path, error: JobError) -> "Skipped":
        return cls(path, str(error).removeprefix(f"checkpoint {path}: "), _KINDS.get(type(error), Unusable.DAMAGED))


@dataclass(frozen=True)
class Search:
    """The newest checkpoint that is whole, and the newer ones that cannot be used, newest first."""

    newest: CheckpointInfo | None
    skipped: tuple[Skipped, ...]


def survey(folder: Path) -> tuple[CheckpointInfo | Skipped, ...]:
    """Everything with a checkpoint's name, oldest first. A leftover of a writer that died has no such name."""
    if (shown := shown_by(folder)) is not None:
        shown.refresh()
    try:
        found = _named(folder)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise CheckpointError(f"cannot list the checkpoints in {folder}: {error.strerror}") from error
    return tuple(look_at(path) for path in found)


def newest_generation(folder: Path) -> tuple[int, int]:
    """The highest generation (incarnation, number) that has committed a checkpoint there; below all if none has.

    One of more incarnations than any run can have had counts for none: whoever numbers on from it would write what
    no reader takes, and everything else would be too late.
    """
    written = (each.manifest.generation for each in survey(folder) if isinstance(each, CheckpointInfo))
    credible = (each for each in written if each is not None and each[0] <= MOST_INCARNATIONS)
    return max(credible, default=(0, 0))


def newest_manifest(folder: Path) -> Manifest | None:
    """The manifest of the newest checkpoint that has a sound one; no other is read."""
    try:
        found = (look_at(path) for path in reversed(_named(folder)))
    except OSError:
        return None
    return next((each.manifest for each in found if isinstance(each, CheckpointInfo)), None)


def look_at(path: Path) -> CheckpointInfo | Skipped:
    """The checkpoint at a path, or why there is none."""
    try:
        return CheckpointInfo(path, read_manifest(path))
    except CheckpointError as error:
        return Skipped.of(path, error)


def read_manifest(path: Path, content: bytes | None = None) -> Manifest:
    """The manifest of the checkpoint in a folder, or of one that will be there, from its content; raises
    `CheckpointError` where it is not sound."""
    try:
        manifest = Manifest.from_json((read_regular(path / MANIFEST) if content is None else content).decode())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is damaged"
        raise CheckpointError(f"checkpoint {path}: cannot read {MANIFEST}: {reason}") from None
    except CheckpointError as error:
        raise type(error)(f"checkpoint {path}: {error}") from None
    if cursor_of(path.name) != manifest.cursor:
        expected = checkpoint_name(manifest.cursor)
        raise CheckpointError(f"checkpoint {path}: the manifest is of another checkpoint, {expected}")
    return manifest


def checkpoint_name(cursor: Cursor) -> str:
    """The folder name of a checkpoint."""
    return f"step-{cursor.step:08d}" + ("-evaluated" if cursor.phase is Phase.EVALUATED else "")


def cursor_of(name: str) -> Cursor | None:
    """The cursor in a checkpoint's folder name; none for a folder that is not one, such as a leftover."""
    match = _NAME.fullmatch(name)
    return None if match is None else Cursor(int(match[1]), Phase.EVALUATED if match[2] else Phase.TRAINED)


def _named(folder: Path) -> list[Path]:
    """Everything in a folder that has the name of a checkpoint, oldest first."""
    found = sorted((cursor, path) for path in folder.iterdir() if (cursor := cursor_of(path.name)))
    return [path for _, path in found]


# --- a folder that shows what is in a store


class ShownFolder(ABC):
    """The checkpoints of a run in a store, shown by a folder. Every trouble is a `CheckpointError`."""

    @abstractmethod
    def refresh(self) -> set[str]:
        """Show what is there now: each checkpoint that has its manifest and all parts of it. Returns the names of all
        that have a manifest."""

    @abstractmethod
    def fetch(self, name: str, file: str, size: int) -> None:
        """Have a part of a checkpoint in the folder."""


def shown_by(folder: Path) -> ShownFolder | None:
    """What a folder of checkpoints shows; None for one that has them itself."""
    store = stored_by(folder.parent)
    if store is None:
        return None
    shown = resolve_name("quorate.stores.stored_run:ObjectFolder")(store, folder)
    assert isinstance(shown, ShownFolder)
    return shown


def fetch_missing(checkpoint: Path, file: str, size: int) -> None:
    """Before a part is read: where it is still in a store only, have it here."""
    if not (checkpoint / file).exists() and (shown := shown_by(checkpoint.parent)) is not None:
        shown.fetch(checkpoint.name, file, size)
