"""Whether what lies on the disk is what was written."""

from pathlib import Path

import xxhash

from quorate.checkpoint.manifest import Manifest, Part
from quorate.checkpoint.name import checkpoint_name, cursor_of
from quorate.core.errors import CheckpointError

MANIFEST = "manifest.json"
_PIECE = 1 << 22


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint in a folder; raises `CheckpointError` where it is not sound."""
    try:
        manifest = Manifest.from_json((path / MANIFEST).read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is damaged"
        raise CheckpointError(f"checkpoint {path}: cannot read {MANIFEST}: {reason}") from None
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {path}: {error}") from None
    if cursor_of(path.name) != manifest.cursor:
        expected = checkpoint_name(manifest.cursor)
        raise CheckpointError(f"checkpoint {path}: the manifest is of another checkpoint, {expected}")
    return manifest


def verify_part(folder: Path, part: Part) -> None:
    """Read a part through; raises `CheckpointError` where it is not what the manifest says."""
    problem = f"checkpoint {folder}: part {part.file}"
    # A name with a folder in it would make a manifest reach outside its checkpoint.
    if Path(part.file).name != part.file:
        raise CheckpointError(f"{problem} is not inside the checkpoint")
    digest = xxhash.xxh3_128()
    size = 0
    try:
        with (folder / part.file).open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
                size += len(piece)
    except OSError as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise CheckpointError(f"{problem} {reason}") from None
    if size != part.bytes:
        how = "truncated" if size < part.bytes else "too long"
        raise CheckpointError(f"{problem} is {how}: it has {size:,} bytes and the manifest says {part.bytes:,}")
    if digest.hexdigest() != part.xxh3_128:
        raise CheckpointError(
            f"{problem} is damaged or of another checkpoint: its digest is {digest.hexdigest()} "
            f"and the manifest says {part.xxh3_128}"
        )
