"""Encryption at rest: AES-256-GCM in chunks, so that a part of any size is sealed and opened as it streams.

A sealed content is a header (a mark, the id of the key, a random salt) and chunks of 1 MiB, each with a tag of its own.
Every content has a key of its own, made from the key and the salt (HKDF), so no pair of key and nonce comes twice. The
header, a chunk's number and whether it is the last are authenticated with each chunk: a content that was cut short, put
in another order or mixed with another does not open.
"""

import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from quorate.checkpoint.manifest import Seal
from quorate.core.digests import Buffer
from quorate.core.errors import CheckpointError
from quorate.core.installation import install_of
from quorate.core.machine import fresh_memory

ALGORITHM = "aes-256-gcm"
KEY_SIZE = 32
CHUNK = 1 << 20
TAG = 16
_MARK = b"qrtseal1"
_SALT = 32
_ID = 8
HEADER = len(_MARK) + _ID + _SALT
_PURPOSE = b"quorate sealed content"
_TAG_PURPOSE = b"quorate manifest tag"


class Cipher(Seal):
    """Seals and opens contents with one key, which it never shows."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_SIZE:
            raise CheckpointError(f"a key has {KEY_SIZE} bytes and this one has {len(key)}")
        _cryptography()
        self._key = key
        self.key_id = hashlib.sha256(b"quorate key id" + key).hexdigest()[: 2 * _ID]

    def __repr__(self) -> str:
        return f"Cipher(key {self.key_id})"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a cipher holds a key and is never written anywhere")

    @property
    def label(self) -> dict[str, str]:
        """What a manifest says of it."""
        return {"cipher": ALGORITHM, "key": self.key_id}

    def tag(self, content: bytes) -> str:
        """What vouches for a content that stays readable: without the key nobody makes the right one."""
        _, hkdf, hashes, _ = _cryptography()
        key = hkdf.HKDF(hashes.SHA256(), KEY_SIZE, None, _TAG_PURPOSE).derive(self._key)
        return hmac.new(key, content, hashlib.sha256).hexdigest()

    def seal(self, chunks: Iterable[Buffer], context: bytes = b"") -> Iterator[bytes]:
        """The sealed bytes of a content that comes in pieces; it opens only with the same context, which it lacks."""
        header = _MARK + bytes.fromhex(self.key_id) + secrets.token_bytes(_SALT)
        lock = _Lock(self._key, header, context)
        yield header
        waiting = bytearray(CHUNK)
        filled = number = 0
        for chunk in chunks:
            view = memoryview(chunk)
            rest = view.cast("B") if view.nbytes else memoryview(b"")
            while rest:
                # A full chunk waits until more comes: only then is it known not to be the last.
                if filled == CHUNK:
                    yield lock.seal(waiting, number, last=False)
                    filled, number = 0, number + 1
                taken = min(CHUNK - filled, len(rest))
                waiting[filled : filled + taken] = rest[:taken]
                filled, rest = filled + taken, rest[taken:]
        yield lock.seal(memoryview(waiting)[:filled], number, last=True)

    def open(self, content: Buffer, context: bytes = b"") -> memoryview:
        """What was sealed; raises `CheckpointError` for anything but exactly that."""
        rest = memoryview(content).cast("B")

        def fill(buffer: memoryview) -> None:
            nonlocal rest
            buffer[:], rest = rest[: len(buffer)], rest[len(buffer) :]

        return self.open_from(fill, len(rest), context)

    def open_from(self, fill: Callable[[memoryview], None], size: int, context: bytes = b"") -> memoryview:
        """The same of so many bytes as they stream: `fill` fills a buffer with the next of them."""
        header = memoryview(bytearray(min(HEADER, size)))
        fill(header)
        lock, sealed = self._lock_of(bytes(header), size, context), size - HEADER
        count = -(-sealed // (CHUNK + TAG))
        last = sealed - (count - 1) * (CHUNK + TAG)
        if last < TAG:
            raise CheckpointError(f"the encrypted content is cut short: {last} bytes are less than a chunk")
        opened = fresh_memory(sealed - count * TAG)
        scratch = memoryview(bytearray(min(CHUNK + TAG, sealed)))
        for number in range(count):
            is_last = number == count - 1
            chunk = scratch[:last] if is_last else scratch
            fill(chunk)
            place = opened[number * CHUNK :][: len(chunk) - TAG]
            if lock.opens(chunk, place, number, last=is_last):
                continue
            if is_last and lock.opens(chunk, place, number, last=False):
                raise CheckpointError(f"the encrypted content is cut short: chunk {number + 1} is not its last")
            raise CheckpointError(
                f"chunk {number + 1} of {count} of the encrypted content is not authentic: "
                "it was changed, moved or taken from another file"
            )
        return opened

    def _lock_of(self, header: bytes, size: int, context: bytes) -> "_Lock":
        if size < HEADER + TAG:
            raise CheckpointError(f"the encrypted content is cut short: it has {size:,} bytes")
        if not header.startswith(_MARK):
            raise CheckpointError("the content is not encrypted as Quorate does it, or its first bytes are damaged")
        sealed_with = header[len(_MARK) :][:_ID].hex()
        if sealed_with != self.key_id:
            raise CheckpointError(
                f"the content was encrypted with key {sealed_with} and the key given is {self.key_id}"
            )
        return _Lock(self._key, header, context)


class _Lock:
    """The key of one content."""

    def __init__(self, key: bytes, header: bytes, context: bytes) -> None:
        aead, hkdf, hashes, self._invalid = _cryptography()
        salt = header[-_SALT:]
        self._gcm = aead.AESGCM(hkdf.HKDF(hashes.SHA256(), KEY_SIZE, salt, _PURPOSE).derive(key))
        self._header = header
        self._context = context

    def seal(self, content: Buffer, number: int, *, last: bool) -> bytes:
        nonce = _nonce(number, last)
        sealed: bytes = self._gcm.encrypt(nonce, content, self._header + nonce + self._context)
        return sealed

    def opens(self, sealed: Buffer, into: memoryview, number: int, *, last: bool) -> bool:
        """Whether a chunk is authentic; if so, its content is in `into`."""
        try:
            nonce = _nonce(number, last)
            self._gcm.decrypt_into(nonce, sealed, self._header + nonce + self._context, into)
        except self._invalid:
            return False
        return True


def _nonce(number: int, last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([last])


def _cryptography() -> tuple[Any, Any, Any, Any]:
    """The library, which only those need who encrypt."""
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.ciphers import aead
        from cryptography.hazmat.primitives.kdf import hkdf
    except ImportError:
        raise CheckpointError(
            f"encrypted checkpoints need the package `cryptography`: {install_of('encryption')}"
        ) from None
    return aead, hkdf, hashes, InvalidTag
