"""Writing a checkpoint anew under another key, in its own folder.

The new parts get names of their own beside the old ones. Then the manifest is replaced, in one move: until then the
checkpoint is the old one, and from then on the new one. What is left over of the other goes last, also that of one who
died before.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quorate.checkpoint.attempt import WRITING
from quorate.checkpoint.cipher import Cipher
from quorate.checkpoint.key import cipher_of
from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.manifest import Manifest, Part
from quorate.checkpoint.part_file import read_part, write_part
from quorate.checkpoint.store import REMOVING
from quorate.checkpoint.verification import MANIFEST, read_manifest
from quorate.core.errors import CheckpointError
from quorate.storage.atomic import discard, sync_folder, write_atomically

KeyPlace = Mapping[str, Any] | None
"""Where a key lies, as `checkpoint.encrypt` of a job says it; None where nothing is encrypted."""


def rekey(info: CheckpointInfo, new: Cipher | None, place: KeyPlace, old: Cipher | None = None) -> bool:
    """Encrypt a checkpoint with another key, or not at all; `place` is where the key will be looked for.

    `old` opens it, if not what its own job names. False if it was so already. No file stays that is not of it.
    """
    path = info.path
    try:
        manifest = read_manifest(path)
        wanted = _placed(manifest, place)
        if manifest.encryption != (None if new is None else new.label):
            wanted = _rewritten(info, wanted, cipher_of(manifest, old, trusting=True), new)
        elif new is not None:
            # Of an earlier version it has no tag; what has one is not vouched for again before it is checked.
            wanted = wanted.tagged(cipher_of(manifest, new, trusting=True) or new)
        if wanted != manifest:
            write_atomically(path / MANIFEST, wanted.to_json())
        kept = {MANIFEST, *(part.file for part in wanted.parts)}
        _remove([entry for entry in path.iterdir() if entry.name not in kept])
    except OSError as error:
        raise CheckpointError(f"checkpoint {path}: cannot be rewritten: {error.strerror or error}") from error
    return wanted != manifest


def sweep_leftovers(folder: Path) -> None:
    """Remove what writers that died have left in a folder of checkpoints, since it is not under the new key.

    For one who holds the run: of one that is running, these are the saves on their way.
    """
    try:
        _remove([entry for entry in folder.iterdir() if entry.name.startswith((WRITING, REMOVING))])
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"cannot remove what is left over in {folder}: {error.strerror or error}") from error


def _remove(entries: list[Path]) -> None:
    for entry in entries:
        discard(entry)
        if os.path.lexists(entry):
            raise CheckpointError(
                f"checkpoint {entry.parent}: {entry.name}, which is left over and not under the new key, cannot be "
                "removed. Make the folder writable"
            )
    for parent in {entry.parent for entry in entries}:
        sync_folder(parent)


def _rewritten(info: CheckpointInfo, manifest: Manifest, old: Cipher | None, new: Cipher | None) -> Manifest:
    parts: list[Part] = []
    try:
        for index, part in enumerate(manifest.parts):
            content = read_part(info.path, part, old)
            stem = f"{index + 1}-of-{len(manifest.parts)}"
            digest = part.digest.partition(":")[0]
            parts.append(write_part(info.path, stem, [content], digest=digest, cipher=new))
    except (OSError, CheckpointError):
        # The new key may be none: a part in plain does not stay beside encrypted ones.
        for part in parts:
            discard(info.path / part.file)
        raise
    return replace(manifest.opened(old), parts=tuple(parts)).sealed(new)


def _placed(manifest: Manifest, place: KeyPlace) -> Manifest:
    section = {**(manifest.job.get("checkpoint") or {}), "encrypt": None if place is None else dict(place)}
    return replace(manifest, job={**manifest.job, "checkpoint": section})
