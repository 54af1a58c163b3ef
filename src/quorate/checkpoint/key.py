"""The key that checkpoints are encrypted with: where it is found, and whether it is the right one."""

import base64
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from quorate.checkpoint.cipher import ALGORITHM, KEY_SIZE, Cipher
from quorate.checkpoint.manifest import Manifest
from quorate.core.errors import CheckpointError, UntrustedError

_REMEDY = (
    f"A key is {KEY_SIZE} bytes, as 64 hex digits, in base64 or (in a file) as they are; "
    f"`openssl rand -hex {KEY_SIZE}` makes one."
)


class KeySource(Protocol):
    """Where a key lies, as a job file says it."""

    @property
    def key_file(self) -> str | None:
        """The path of a file."""

    @property
    def key_env(self) -> str | None:
        """The name of an environment variable."""


def read_key(source: Mapping[str, Any] | KeySource) -> Cipher:
    """The cipher of a key in a file or an environment variable."""
    if isinstance(source, Mapping):
        file, variable = source.get("key_file"), source.get("key_env")
    else:
        file, variable = source.key_file, source.key_env
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
    if given is not None and given.key_id == key_id:
        return _checked(manifest, given)
    try:
        own = _own_cipher(manifest)
    except CheckpointError:
        if given is None:
            raise
        own = None
    if own is None and given is None:
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} is encrypted with key {key_id} and its job does not say where "
            "that is. Name it by `checkpoint.encrypt.key_file` or `checkpoint.encrypt.key_env`."
        )
    if own is None or own.key_id != key_id:
        other = given or own
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} is encrypted with key {key_id} and the key given is "
            f"{other and other.key_id}. Give the key that it was written with."
        )
    return _checked(manifest, own)


def _refuse_untrusted(manifest: Manifest, given: Cipher) -> None:
    encryption = manifest.encryption
    if encryption is None:
        what = "is not encrypted, although `checkpoint.encrypt` asks for that"
    elif (key_id := encryption.get("key")) != given.key_id:
        what = f"is encrypted with key {key_id} and the key given is {given.key_id}"
    elif not manifest.tag:
        what = "was encrypted by an earlier version of Quorate, so the key does not vouch for its manifest"
    else:
        return
    raise UntrustedError(
        f"the checkpoint of step {manifest.step} {what}: anybody who can write there may have put it there. If it is "
        "yours, `quorate checkpoints rekey` puts it under the key, with --include-untrusted beside others that are."
    )


def _checked(manifest: Manifest, cipher: Cipher) -> Cipher:
    if manifest.tag:
        manifest.check_tag(cipher)
    return cipher


def _own_cipher(manifest: Manifest) -> Cipher | None:
    section = manifest.job.get("checkpoint")
    source = section.get("encrypt") if isinstance(section, Mapping) else None
    return read_key(source) if isinstance(source, Mapping) else None


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
    try:
        key = bytes.fromhex(text.decode()) if re.fullmatch(rb"[0-9A-Fa-f]{64}", text) else _from_base64(text)
    except ValueError:
        key = b""
    if len(key) != KEY_SIZE:
        raise CheckpointError(f"{where} holds {len(content)} bytes that are no key. {_REMEDY}")
    return key


def _from_base64(text: bytes) -> bytes:
    """In either alphabet, with or without the padding."""
    plain = text.translate(bytes.maketrans(b"-_", b"+/")).rstrip(b"=")
    return base64.b64decode(plain + b"=" * (-len(plain) % 4), validate=True)
