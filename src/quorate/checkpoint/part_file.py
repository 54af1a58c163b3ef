"""The parts of a checkpoint on the disk. The name of a part tells its digest, and is there only when it is whole."""

import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quorate.checkpoint.cipher import CHUNK, HEADER, TAG, Cipher
from quorate.checkpoint.digester import SHA, XXH3, Digester, labelled, new_digester
from quorate.checkpoint.manifest import Part
from quorate.checkpoint.verification import PIECE, problem_of, reading, verify_part
from quorate.core.errors import CheckpointError
from quorate.core.memory import fresh_memory
from quorate.storage.atomic import Buffer, begin_writeback, discard, move_into_place, write_fully

AHEAD = 16 << 20
"""Bytes after which the disk begins with what was written: less is left to wait for at the end."""
SEALED = ".enc"
"""How the name of an encrypted part ends."""
_NAME = re.compile(r"(\d+)-of-\d+\.([0-9a-f]{32}|[0-9a-f]{64})\.safetensors(?:\.enc)?")
_DIGEST_OF_LENGTH = {32: XXH3, 64: SHA}


def write_part(folder: Path, stem: str, chunks: Iterable[Buffer], *, digest: str, cipher: Cipher | None = None) -> Part:
    """Write a part, through to the disk and read back; only then does it get its name. On failure nothing is left."""
    # What is read back is compared by the quick digest, whichever is asked for.
    digesters = {name: new_digester(name) for name in (digest, XXH3)}
    partial = folder / f".{stem}.{secrets.token_hex(4)}.partial"
    try:
        size = _write(partial, chunks if cipher is None else cipher.seal(chunks), digesters)
        name = f"{stem}.{digesters[digest].hexdigest()}.safetensors" + (SEALED if cipher else "")
        move_into_place(partial, folder / name)
    except BaseException:
        discard(partial)
        raise
    return Part(name, size, labelled(digest, digesters[digest]))


def read_part(folder: Path, part: Part, cipher: Cipher | None = None) -> memoryview:
    """The content of a part in memory of its own, verified, and decrypted where there is a cipher. It is read once."""
    if cipher is not None:
        return _read_sealed(folder, part, cipher)
    with reading(folder, part) as fill:
        memory = fresh_memory(part.bytes)
        for start in range(0, part.bytes, PIECE):
            fill(memory[start : start + PIECE])
    return memory


def parts_in(folder: Path) -> dict[int, Part]:
    """The parts that lie in a folder, by the number that their names begin with.

    Where a part was written twice (encrypted, it has another digest each time), it is the first by name.
    """
    found: dict[int, Part] = {}
    for entry in sorted(folder.iterdir(), reverse=True):
        match = _NAME.fullmatch(entry.name)
        if match is None or not entry.is_file():
            continue
        digest = f"{_DIGEST_OF_LENGTH[len(match[2])]}:{match[2]}"
        found[int(match[1])] = Part(entry.name, entry.stat().st_size, digest)
    return dict(sorted(found.items()))


def _write(path: Path, chunks: Iterable[Buffer], digesters: Mapping[str, Digester]) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        size = begun = 0
        for piece in _pieces(chunks):
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
            found = _read_back(descriptor, size)
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


def _pieces(chunks: Iterable[Buffer]) -> Iterator[memoryview]:
    for chunk in chunks:
        view = memoryview(chunk)
        if view.nbytes:
            view = view.cast("B")
            yield from (view[start : start + PIECE] for start in range(0, len(view), PIECE))


def _read_back(descriptor: int, size: int) -> str:
    digester = new_digester(XXH3)
    scratch = memoryview(bytearray(min(PIECE, size)))
    at = 0
    while at < size and (count := os.preadv(descriptor, [scratch[: size - at]], at)):
        digester.update(scratch[:count])
        at += count
    return digester.hexdigest()


def _read_sealed(folder: Path, part: Part, cipher: Cipher) -> memoryview:
    try:
        with reading(folder, part) as fill:
            header = memoryview(bytearray(min(HEADER, part.bytes)))
            fill(header)
            opening = cipher.opening(header, part.bytes)
            memory = fresh_memory(opening.size)
            scratch = memoryview(bytearray(min(CHUNK + TAG, part.bytes)))
            for size, place in opening.chunks(memory):
                fill(scratch[:size])
                opening.open(scratch[:size], place)
    except CheckpointError as error:
        # Damage is found by the cipher before the digest is known; but which file is damaged is what helps.
        verify_part(folder, part)
        raise CheckpointError(f"{problem_of(folder, part)} cannot be decrypted: {error}") from None
    return memory
