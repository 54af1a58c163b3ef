"""Files and folders that appear whole or not at all, also when the process or the machine dies half way."""

import contextlib
import ctypes
import errno
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from quorate.core.errors import JobError, RunError

Buffer = bytes | bytearray | memoryview

_SYNC_FILE_RANGE_WRITE = 2
# Of Linux, and not in Python's `os`. Where it is missing, writing takes longer and is no less safe.
_sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


_TEMPORARY = re.compile(r"\..+?\.(?:([0-9a-f]+)-([0-9]+)-)?[0-9a-f]+\.partial")
_ABANDONED = 3600.0
"""Seconds after which a temporary is abandoned, where nobody can tell whether its writer lives."""


def temporary_of(path: Path) -> Path:
    """A name for what becomes this file when it is whole; it tells who writes it."""
    return path.with_name(f".{path.name}.{_host()}-{os.getpid()}-{secrets.token_hex(4)}.partial")


def is_abandoned(name: str, modified: float) -> bool:
    """Whether this is the name of a temporary whose writer is gone."""
    if (writer := _TEMPORARY.fullmatch(name)) is None:
        return False
    if writer[1] == _host():
        try:
            os.kill(int(writer[2]), 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass
    # The number of a process that is gone may be another's by now, and nobody sees the processes of other hosts.
    return time.time() - modified > _ABANDONED


def sweep(folder: Path) -> None:
    """Remove what writers that were killed have left in a folder, and in the folders in it."""
    with contextlib.suppress(OSError):
        for path in (*folder.glob(".*.partial"), *folder.glob("*/.*.partial")):
            with contextlib.suppress(OSError):
                if is_abandoned(path.name, path.lstat().st_mtime):
                    path.unlink()


@cache
def _host() -> str:
    """Equal for processes that see each other's numbers: by the boot and the namespace, as containers share names."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116 (not a file)
    except OSError:
        boot, space = secrets.token_hex(16), 0  # then only age tells what is abandoned
    return hashlib.sha256(f"{boot} {space}".encode()).hexdigest()[:16]


def write_atomically(path: Path, data: bytes | str, mode: int = 0o644) -> None:
    """Replace a file by another content: a reader sees the old or the new one, never a part."""
    content = data.encode() if isinstance(data, str) else data
    # Every writer has a temporary of its own: two of them on one name would rename each other's half-written file.
    temporary = temporary_of(path)
    try:
        write_new_file(temporary, [content], mode)
        move_into_place(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_new_file(path: Path, chunks: Iterable[Buffer], mode: int = 0o644) -> int:
    """Write a file that does not exist yet, through to the disk; returns its size."""
    # The mode is given at creation: a secret must not be readable for the moment before a chmod.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        size = sum(write_fully(descriptor, chunk) for chunk in chunks)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return size


def write_fully(descriptor: int, chunk: Buffer) -> int:
    """Write all of a buffer: a single write may stop short, at 2 GiB or on a disk that is almost full."""
    view = memoryview(chunk)
    size = view.nbytes
    # A view without elements cannot be cast, and has nothing to write.
    rest = view.cast("B") if size else memoryview(b"")
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    return size


def begin_writeback(descriptor: int, start: int, length: int) -> None:
    """Have the disk begin with a part of a file that was written; nothing is waited for, and nothing promised."""
    if _sync_file_range is not None:
        _sync_file_range(descriptor, start, length, _SYNC_FILE_RANGE_WRITE)


def move_into_place(temporary: Path, final: Path) -> None:
    """Give a file or folder, already on the disk, its final name, and make the name survive a power cut."""
    os.rename(temporary, final)  # noqa: PTH104 (one seam for every call that changes the disk)
    sync_folder(final.parent)


def put_in_place(temporary: Path, final: Path, aside: Path) -> None:
    """Give a folder a name that another may have, which is moved aside first and removed in the end; it comes back if
    the new one cannot have its name."""
    is_there = final.exists()
    if is_there:
        move_into_place(final, aside)
    try:
        move_into_place(temporary, final)
    except OSError:
        if is_there:
            with contextlib.suppress(OSError):
                move_into_place(aside, final)
        raise
    if is_there:
        discard(aside)


def sync_folder(folder: Path) -> None:
    """Write a folder's list of names through to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard(path: Path) -> None:
    """Remove a folder or file as far as possible; what cannot be removed now is left for the next sweep."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def explaining(what: str, remedy: str = "") -> Iterator[None]:
    """Turn an error of the operating system into one that names the folder, the reason and the remedy."""
    try:
        yield
    except OSError as error:
        place = f" ({os.fspath(error.filename)})" if error.filename is not None else ""
        # A full disk is no mistake in the request.
        kind = JobError if error.errno in (errno.ENOSPC, errno.EDQUOT) else RunError
        raise kind(f"{what}: {error.strerror or error}{place}. {remedy}".rstrip()) from error
