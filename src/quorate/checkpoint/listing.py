"""What is in a folder of checkpoints, by their manifests: no part is read."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from quorate.checkpoint.manifest import Manifest
from quorate.checkpoint.name import cursor_of
from quorate.checkpoint.verification import read_manifest
from quorate.core.cursor import Cursor
from quorate.core.errors import CheckpointError, NewerFormatError


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint as its manifest tells it; its parts have not been looked at."""

    path: Path
    manifest: Manifest

    @property
    def cursor(self) -> Cursor:
        """The point of the job at which it was saved."""
        return self.manifest.cursor

    @property
    def bytes(self) -> int:
        """What its parts take on the disk."""
        return sum(part.bytes for part in self.manifest.parts)


class Unusable(StrEnum):
    """Why a checkpoint is not for use; told after its name."""

    DAMAGED = "is damaged"
    NEWER = "is of a newer version"
    FOREIGN = "is not of this run"


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that cannot be used, and why; the reason leaves out where, which the path says."""

    path: Path
    reason: str
    kind: Unusable = Unusable.DAMAGED

    @classmethod
    def of(cls, path: Path, error: CheckpointError) -> "Skipped":
        """The checkpoint at a path, skipped for this error."""
        kind = Unusable.NEWER if isinstance(error, NewerFormatError) else Unusable.DAMAGED
        return cls(path, str(error).removeprefix(f"checkpoint {path}: "), kind)


@dataclass(frozen=True)
class Search:
    """The newest checkpoint that is whole, and the newer ones that cannot be used, newest first."""

    newest: CheckpointInfo | None
    skipped: tuple[Skipped, ...]


def survey(folder: Path) -> tuple[CheckpointInfo | Skipped, ...]:
    """Everything with a checkpoint's name, oldest first. A leftover of a writer that died has no such name."""
    try:
        found = sorted((cursor, entry) for entry in folder.iterdir() if (cursor := cursor_of(entry.name)))
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise CheckpointError(f"cannot list the checkpoints in {folder}: {error.strerror}") from error
    return tuple(look_at(path) for _, path in found)


def look_at(path: Path) -> CheckpointInfo | Skipped:
    """The checkpoint at a path, or why there is none."""
    try:
        return CheckpointInfo(path, read_manifest(path))
    except CheckpointError as error:
        return Skipped.of(path, error)
