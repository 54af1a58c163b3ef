"""The parts of a checkpoint on the disk. The name of a part tells its digest, and is there only when it is whole."""

import hashlib
import io
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from quorate.checkpoint.listing import fetch_missing
from quorate.checkpoint.manifest import PART_NAME, Part, Seal
from quorate.core.errors import CheckpointError
from quorate.core.machine import fresh_memory
from quorate.core.regular_file import open_regular
from quorate.storage.atomic import Buffer, begin_writeback, discard, move_into_place, write_fully

PIECE = 1 << 20
"""Bytes that are read, written and digested at a time: few enough to be in the cache still, and many enough that
threads do not fight for the interpreter."""
AHEAD = 16 << 20
"""Bytes after which the disk begins with what was written: less is left to wait for at the end."""
SEALED = ".enc"
"""How the name of an encrypted part ends."""


# xxh3-128 finds damage, sha-256 also finds what somebody made up. Both let other threads run during a large update.
XXH3 = "xxh3-128"
SHA = "sha-256"
_MAKERS: dict[str, Callable[[], Any]] = {XXH3: xxhash.xxh3_128, SHA: hashlib.sha256}
DIGESTS = tuple(_MAKERS)
_DIGEST_OF_LENGTH = {32: XXH3, 64: SHA}


def write_part(folder: Path, stem: str, chunks: Iterable[Buffer], *, digest: str, cipher: Seal | None = None) -> Part:
    """Write a part, through to the disk and read back; only then does it get its name. On failure nothing is left."""
    # What is read back is compared by the quick digest, whichever is asked for.
    digesters = {name: _MAKERS[name]() for name in (digest, XXH3)}
    partial = folder / f".{stem}.{secrets.token_hex(4)}.partial"
    try:
        size = _write(partial, chunks if cipher is None else cipher.seal(chunks), digesters)
        name = f"{stem}.{digesters[digest].hexdigest()}.safetensors" + (SEALED if cipher else "")
        move_into_place(partial, folder / name)
    except BaseException:
        discard(partial)
        raise
    return Part(name, size, f"{digest}:{digesters[digest].hexdigest()}")


def read_part(folder: Path, part: Part, cipher: Seal | None = None) -> memoryview:
    """The content of a part in memory of its own, verified, and decrypted where there is a cipher. It is read once."""
    try:
        with reading(folder, part) as fill:
            if cipher is not None:
                return cipher.open_from(fill, part.bytes)
            memory = fresh_memory(part.bytes)
            for start in range(0, part.bytes, PIECE):
                fill(memory[start : start + PIECE])
        return memory
    except CheckpointError as error:
        if cipher is None:
            raise
        # Damage is found by the cipher before the digest is known; but which file is damaged is what helps.
        verify_part(folder, part)
        raise CheckpointError(f"checkpoint {folder}: part {part.file} cannot be decrypted: {error}") from None


def parts_in(folder: Path) -> dict[int, Part]:
    """The parts that lie in a folder, by index: their names begin with that and one.

    Where a part was written twice (encrypted, it has another digest each time), it is the first by name.
    """
    found: dict[int, Part] = {}
    for entry in sorted(folder.iterdir(), reverse=True):
        # By its name first: one that is still being written gets another name at any moment.
        if PART_NAME.fullmatch(entry.name) is None or not entry.is_file():
            continue
        if (named := part_named(entry.name, entry.stat().st_size)) is not None:
            found[named[0]] = named[1]
    return dict(sorted(found.items()))


def part_named(name: str, size: int) -> tuple[int, Part] | None:
    """The part of a file with this name, and its index; None for a file that is none."""
    match = PART_NAME.fullmatch(name)
    if match is None:
        return None
    return int(match[1]) - 1, Part(name, size, f"{_DIGEST_OF_LENGTH[len(match[2])]}:{match[2]}")


def verify_part(folder: Path, part: Part) -> None:
    """Read a part through; raises `CheckpointError` where it is not what the manifest says."""
    with reading(folder, part) as fill:
        scratch = memoryview(bytearray(min(PIECE, part.bytes)))
        for start in range(0, part.bytes, PIECE):
            fill(scratch[: part.bytes - start])


@contextmanager
def reading(folder: Path, part: Part) -> Iterator[Callable[[memoryview], None]]:
    """Read a part in one pass: gives a function that fills a buffer with the next bytes of it, to the last.

    Raises `CheckpointError` where the part is not what the manifest says: for a wrong size at once, for a wrong digest
    at the end.
    """
    problem = f"checkpoint {folder}: part {part.file}"
    # A name with a folder in it would make a manifest reach outside its checkpoint.
    if Path(part.file).name != part.file:
        raise CheckpointError(f"{problem} is not inside the checkpoint")
    name, _, expected = part.digest.partition(":")
    if name not in _MAKERS:
        raise CheckpointError(f"the digest {name!r} is unknown: this version of Quorate knows {' and '.join(DIGESTS)}")
    digester = _MAKERS[name]()

    def fill(buffer: memoryview) -> None:
        rest = buffer
        while rest and (count := file.readinto(rest)):
            rest = rest[count:]
        if rest:
            raise CheckpointError(f"{problem} is truncated: it became shorter while it was read")
        digester.update(buffer)

    fetch_missing(folder, part.file, part.bytes)
    try:
        with io.FileIO(open_regular(folder / part.file)) as file:
            size = os.fstat(file.fileno()).st_size
            if size != part.bytes:
                how = "truncated" if size < part.bytes else "too long"
                raise CheckpointError(f"{problem} is {how}: it has {size:,} bytes and the manifest says {part.bytes:,}")
            yield fill
    except OSError as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise CheckpointError(f"{problem} {reason}") from None
    if digester.hexdigest() != expected:
        raise CheckpointError(
            f"{problem} is damaged or of another checkpoint: its digest is {digester.hexdigest()} "
            f"and the manifest says {expected}"
        )


def _write(path: Path, chunks: Iterable[Buffer], digesters: Mapping[str, Any]) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        size = begun = 0
        for chunk in chunks:
            view = memoryview(chunk)
            view = view.cast("B") if view.nbytes else memoryview(b"")
            for start in range(0, len(view), PIECE):
                piece = view[start : start + PIECE]
                for digester in digesters.values():
                    digester.update(piece)
                size += write_fully(descriptor, piece)
                if size - begun >= AHEAD:
                    begin_writeback(descriptor, begun, size - begun)
                    begun = size
        # Reading back finds what differs from what was digested: memory that changed between digest and write, a file
        # system that lies. It costs no time, since the disk is waited for meanwhile.
        with ThreadPoolExecutor(1, "fsync") as thread:
            synced = thread.submit(os.fsync, descriptor)
            scratch, at = memoryview(bytearray(min(PIECE, size))), 0
            read_back = _MAKERS[XXH3]()
            while at < size and (count := os.preadv(descriptor, [scratch[: size - at]], at)):
                read_back.update(scratch[:count])
                at += count
            found = read_back.hexdigest()
        synced.result()
    finally:
        os.close(descriptor)
    expected = digesters[XXH3].hexdigest()
    if found != expected:
        raise CheckpointError(
            f"what was written to {path} reads back differently: its digest is {found} and that of the state is "
            f"{expected}. The state changed while it was written, or this disk is bad."
        )
    return size
