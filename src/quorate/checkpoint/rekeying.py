"""Writing a checkpoint anew under another key, in its own folder.

The new parts get names of their own beside the old ones. Then the manifest is replaced, in one move: until then the
checkpoint is the old one, and from then on the new one. What is left over of the other goes last.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quorate.checkpoint.cipher import Cipher
from quorate.checkpoint.key import cipher_of
from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.manifest import Manifest
from quorate.checkpoint.part_file import read_part, write_part
from quorate.checkpoint.verification import MANIFEST, read_manifest
from quorate.core.errors import CheckpointError
from quorate.storage.atomic import discard, write_atomically

KeyPlace = Mapping[str, Any] | None
"""Where a key lies, as `checkpoint.encrypt` of a job says it; None where nothing is encrypted."""


def rekey(info: CheckpointInfo, new: Cipher | None, place: KeyPlace, old: Cipher | None = None) -> bool:
    """Encrypt a checkpoint with another key, or not at all; `place` is where the key will be looked for.

    `old` opens it, if not what its own job names. False if it was so already.
    """
    path = info.path
    try:
        manifest = read_manifest(path)
        wanted = _placed(manifest, place)
        if manifest.encryption == (None if new is None else new.label):
            if wanted == manifest:
                return False
        else:
            wanted = _rewritten(info, wanted, cipher_of(manifest, old), new)
        write_atomically(path / MANIFEST, wanted.to_json())
        kept = {MANIFEST, *(part.file for part in wanted.parts)}
        for entry in path.iterdir():
            if entry.name not in kept:
                discard(entry)
    except OSError as error:
        raise CheckpointError(f"checkpoint {path}: cannot be rewritten: {error.strerror or error}") from error
    return True


def _rewritten(info: CheckpointInfo, manifest: Manifest, old: Cipher | None, new: Cipher | None) -> Manifest:
    parts = []
    for index, part in enumerate(manifest.parts):
        content = read_part(info.path, part, old)
        stem = f"{index + 1}-of-{len(manifest.parts)}"
        digest = part.digest.partition(":")[0]
        parts.append(write_part(info.path, stem, [content], digest=digest, cipher=new))
    return replace(manifest.opened(old), parts=tuple(parts)).sealed(new)


def _placed(manifest: Manifest, place: KeyPlace) -> Manifest:
    section = {**(manifest.job.get("checkpoint") or {}), "encrypt": None if place is None else dict(place)}
    return replace(manifest, job={**manifest.job, "checkpoint": section})
