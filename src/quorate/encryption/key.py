"""The key that checkpoints are encrypted with: where it is found, whether it is the right one, and changing it."""

import base64
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quorate.checkpoint.listing import (
    REMOVING,
    WRITING,
    CheckpointInfo,
    Skipped,
    Unusable,
    read_manifest,
    survey,
)
from quorate.checkpoint.manifest import MANIFEST, Manifest, Part
from quorate.checkpoint.part_file import read_part, write_part
from quorate.core.errors import CheckpointError, RequestError, UntrustedError
from quorate.encryption.cipher import ALGORITHM, KEY_SIZE, Cipher
from quorate.spec.load import load_recorded
from quorate.spec.options import Sealing
from quorate.spec.override import Override
from quorate.spec.resolved import dump_job
from quorate.storage.atomic import discard, sync_folder, write_atomically
from quorate.storage.run_folder import RunFolder

log = logging.getLogger(__name__)

_REMEDY = (
    f"A key is {KEY_SIZE} bytes, as 64 hex digits, in base64 or (in a file) as they are; "
    f"`openssl rand -hex {KEY_SIZE}` makes one."
)

KeyPlace = Mapping[str, Any] | None
"""Where a key lies, as `checkpoint.encrypt` of a job says it; None where nothing is encrypted."""


def read_key(source: Mapping[str, Any] | Sealing) -> Cipher:
    """The cipher of a key in a file or an environment variable."""
    keys = source if isinstance(source, Mapping) else source.model_dump()
    file, variable = keys.get("key_file"), keys.get("key_env")
    if (file is None) == (variable is None) or not isinstance(file if variable is None else variable, str):
        raise CheckpointError("`checkpoint.encrypt` names one of `key_file` and `key_env`, not both and not none.")
    return _from_file(Path(file).expanduser()) if file is not None else _from_variable(str(variable))


def cipher_of(manifest: Manifest, given: Cipher | None = None, *, trusting: bool = False) -> Cipher | None:
    """The cipher that opens a checkpoint; none where it is plain.

    Where one is given, whoever has that key must have written the checkpoint: one that is plain, under another key or
    without a tag could be anybody's who can write there. `trusting` takes it all the same, as whoever changes the key
    of a run does, and finds the key of each where its own job says.
    """
    if given is not None and not trusting:
        _refuse_untrusted(manifest, given)
    encryption = manifest.encryption
    if encryption is None:
        return None
    if encryption.get("cipher") != ALGORITHM:
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} is encrypted by {encryption.get('cipher')!r} "
            f"and this version of Quorate knows {ALGORITHM}"
        )
    key_id = encryption.get("key")
    cipher = given
    if given is None or given.key_id != key_id:
        section = manifest.job.get("checkpoint")
        source = section.get("encrypt") if isinstance(section, Mapping) else None
        try:
            cipher = read_key(source) if isinstance(source, Mapping) else None
        except CheckpointError:
            if given is None:
                raise
            cipher = None
    if cipher is None and given is None:
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} is encrypted with key {key_id} and its job does not say where "
            "that is. Name it by `checkpoint.encrypt.key_file` or `checkpoint.encrypt.key_env`."
        )
    if cipher is None or cipher.key_id != key_id:
        other = given or cipher
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} is encrypted with key {key_id} and the key given is "
            f"{other and other.key_id}. Give the key that it was written with."
        )
    if manifest.tag:
        manifest.check_tag(cipher)
    return cipher


def rekey(info: CheckpointInfo, new: Cipher | None, place: KeyPlace, old: Cipher | None = None) -> bool:
    """Encrypt a checkpoint with another key, or not at all; `place` is where the key will be looked for.

    `old` opens it, if not what its own job names. False if it was so already. No file stays that is not of it.

    The new parts get names of their own beside the old ones. Then the manifest is replaced, in one move: until then the
    checkpoint is the old one, and from then on the new one. What is left over of the other goes last, also that of one
    who died before.
    """
    path = info.path
    try:
        manifest = read_manifest(path)
        section = {**(manifest.job.get("checkpoint") or {}), "encrypt": None if place is None else dict(place)}
        wanted = replace(manifest, job={**manifest.job, "checkpoint": section})
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


def rekey_run(
    run: RunFolder, place: KeyPlace, old_place: KeyPlace = None, *, include_untrusted: bool = False
) -> tuple[str, ...]:
    """Encrypt all checkpoints of a run with the key in a place, or not at all; the names of those rewritten.

    Each is readable all the time. The run is resumed with the new key. `old_place` is where the key lies that they are
    encrypted with, if not where their jobs say. One with a damaged manifest stays as it is, and is told of by an error
    when all others are done.

    Whatever gets the new key is vouched for by it from then on. So where the run is encrypted already, what was not
    written with the present key is refused before anything changes, unless `include_untrusted` asks for it.
    """
    if run.stored is not None:
        raise RequestError(
            f"run {run.name} is kept in {run.stored}, where no checkpoint can be replaced in one move: only those in a "
            "folder are rekeyed."
        )
    new = None if place is None else read_key(place)
    old: Cipher | None = None if old_place is None else read_key(old_place)
    rewritten: list[str] = []
    value = None if place is None else dict(place)
    override = Override("checkpoint.encrypt", value, "quorate checkpoints rekey")
    with run.lock():
        resolved = load_recorded(run.job_file, {}, [override])
        recorded = load_recorded(run.job_file, {}, []).spec.checkpoint.sealing
        found = survey(run.checkpoints)
        infos = [each for each in found if isinstance(each, CheckpointInfo)]
        damaged = [each for each in found if isinstance(each, Skipped)]
        present = old or (None if recorded is None else read_key(recorded))
        untrusted = _untrusted(infos, present, new)
        if untrusted and not include_untrusted:
            raise CheckpointError(_why_no_new_key(run, untrusted))
        for each in untrusted:
            log.warning("%s is taken on trust: %s", each.path.name, each.reason)
        sweep_leftovers(run.checkpoints)
        for info in infos:
            try:
                if rekey(info, new, place, present):
                    rewritten.append(info.path.name)
            except CheckpointError as error:
                raise CheckpointError(
                    f"{error.message}. {len(rewritten)} of {len(infos)} were rewritten, and all are as readable as "
                    "they were. Try again when this is fixed; one that is damaged can be removed with "
                    f"`quorate checkpoints rm {run.name} --checkpoint {info.cursor.step}`"
                ) from None
        run.write_job(dump_job(resolved))
    if damaged:
        raise CheckpointError(
            f"{damaged[0].path.name} is damaged and stays as it was, not under the new key: {damaged[0].reason}. "
            f"{len(damaged)} of {len(found)} are so; the other {len(infos)} are as asked for. Remove what is damaged "
            f"with `quorate checkpoints rm {run.name} --checkpoint {damaged[0].path.name}`, and try again"
        )
    return tuple(rewritten)


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


def _refuse_untrusted(manifest: Manifest, given: Cipher) -> None:
    encryption = manifest.encryption
    if encryption is None:
        what = "is not encrypted, although `checkpoint.encrypt` asks for that"
    elif (key_id := encryption.get("key")) != given.key_id:
        what = f"is encrypted with key {key_id} and the key given is {given.key_id}"
    elif not manifest.tag:
        what = "was encrypted by an earlier version of Quorate, so the key does not authenticate its manifest"
    else:
        return
    raise UntrustedError(
        f"the checkpoint of step {manifest.step} {what}: anybody who can write there may have put it there. If it is "
        "yours, `quorate checkpoints rekey` puts it under the key, with --include-untrusted beside others that are."
    )


def _from_file(path: Path) -> Cipher:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read the key file {path}: {error.strerror}. {_REMEDY}") from None
    # 32 characters of text are no key but half of one in hex digits, or a password.
    raw = len(content) == KEY_SIZE and not re.fullmatch(rb"[\t\r\n -~]*", content)
    return Cipher(content if raw else _decoded(content, f"the key file {path}"))


def _from_variable(name: str) -> Cipher:
    text = os.environ.get(name)
    if text is None:
        raise CheckpointError(f"the environment variable {name}, which should hold the key, is not set. {_REMEDY}")
    return Cipher(_decoded(os.fsencode(text), f"the environment variable {name}"))


def _decoded(content: bytes, where: str) -> bytes:
    """The key in a text. What is refused is described by its length only."""
    text = content.strip()
    # Base64 in either alphabet, with or without the padding.
    plain = text.translate(bytes.maketrans(b"-_", b"+/")).rstrip(b"=")
    try:
        if re.fullmatch(rb"[0-9A-Fa-f]{64}", text):
            key = bytes.fromhex(text.decode())
        else:
            key = base64.b64decode(plain + b"=" * (-len(plain) % 4), validate=True)
    except ValueError:
        key = b""
    if len(key) != KEY_SIZE:
        raise CheckpointError(f"{where} holds {len(content)} bytes that are no key. {_REMEDY}")
    return key


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
    plain = replace(manifest.opened(old), parts=tuple(parts))
    return plain if new is None else plain.sealed(new)


def _untrusted(infos: Sequence[CheckpointInfo], present: Cipher | None, new: Cipher | None) -> list[Skipped]:
    """Those that nothing vouches for, in a run that is encrypted; what has the new key already got it from here."""
    unlike = [info for info in infos if new is None or _why_untrusted(info, new) is not None]
    if present is None and all(info.manifest.encryption is None for info in unlike):
        return []
    found = ((info, _why_untrusted(info, present)) for info in unlike)
    return [Skipped(info.path, why, Unusable.UNTRUSTED) for info, why in found if why is not None]


def _why_untrusted(info: CheckpointInfo, cipher: Cipher | None) -> str | None:
    if cipher is None:  # the job names no key: then each that is encrypted is opened by the key that it names itself
        return None if info.manifest.encryption is not None else "it is not encrypted, and others of the run are"
    try:
        cipher_of(info.manifest, cipher)
    except UntrustedError as error:
        return error.message
    return None


def _why_no_new_key(run: RunFolder, untrusted: Sequence[Skipped]) -> str:
    names = ", ".join(each.path.name for each in untrusted)
    remove = f"quorate checkpoints rm {run.name} --checkpoint {untrusted[0].path.name}"
    return (
        f"nothing is rewritten: the key of run {run.name} does not authenticate {names} "
        f"({untrusted[0].reason.rstrip('.')}), and the new key would. Remove what is not yours with `{remove}`, or "
        "trust all of them with --include-untrusted"
    )
