"""Whether what lies on the disk is what was written."""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from quorate.checkpoint.digester import new_digester
from quorate.checkpoint.manifest import Manifest, Part
from quorate.checkpoint.name import checkpoint_name, cursor_of
from quorate.core.errors import CheckpointError
from quorate.core.regular_file import open_regular, read_regular

MANIFEST = "manifest.json"
PIECE = 1 << 20
"""Bytes that are read, written and digested at a time: few enough to be in the cache still, and many enough that
threads do not fight for the interpreter."""


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint in a folder; raises `CheckpointError` where it is not sound."""
    try:
        manifest = Manifest.from_json(read_regular(path / MANIFEST).decode())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is damaged"
        raise CheckpointError(f"checkpoint {path}: cannot read {MANIFEST}: {reason}") from None
    except CheckpointError as error:
        raise type(error)(f"checkpoint {path}: {error}") from None
    if cursor_of(path.name) != manifest.cursor:
        expected = checkpoint_name(manifest.cursor)
        raise CheckpointError(f"checkpoint {path}: the manifest is of another checkpoint, {expected}")
    return manifest


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
    problem = problem_of(folder, part)
    # A name with a folder in it would make a manifest reach outside its checkpoint.
    if Path(part.file).name != part.file:
        raise CheckpointError(f"{problem} is not inside the checkpoint")
    name, _, expected = part.digest.partition(":")
    digester = new_digester(name)

    def fill(buffer: memoryview) -> None:
        rest = buffer
        while rest and (count := file.readinto(rest)):
            rest = rest[count:]
        if rest:
            raise CheckpointError(f"{problem} is truncated: it became shorter while it was read")
        digester.update(buffer)

    try:
        with io.FileIO(open_regular(folder / part.file)) as file:
            _check_size(os.fstat(file.fileno()).st_size, part, problem)
            yield fill
    except OSError as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise CheckpointError(f"{problem} {reason}") from None
    if digester.hexdigest() != expected:
        raise CheckpointError(
            f"{problem} is damaged or of another checkpoint: its digest is {digester.hexdigest()} "
            f"and the manifest says {expected}"
        )


def problem_of(folder: Path, part: Part) -> str:
    """How a sentence begins that says what is wrong with a part."""
    return f"checkpoint {folder}: part {part.file}"


def _check_size(size: int, part: Part, problem: str) -> None:
    if size != part.bytes:
        how = "truncated" if size < part.bytes else "too long"
        raise CheckpointError(f"{problem} is {how}: it has {size:,} bytes and the manifest says {part.bytes:,}")
