"""The disk under a folder: whether it is one, and what it takes at least to write and read so many bytes."""

import contextlib
import mmap
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from benchmarks.size import size_in_words
from quorate.core.errors import RequestError

IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
"""File systems without a disk: to write there is to copy, and an fsync does nothing."""

_PIECE = 4 << 20


@dataclass(frozen=True)
class Mount:
    """A file system, and where it is mounted."""

    point: Path
    kind: str


def mount_of(folder: Path, mounts: str) -> Mount:
    """The file system of a folder, by the kernel's list of mounts: the nearest point above it, the newest one there."""
    found = Mount(Path("/"), "unknown")
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        mount = Mount(Path(_unescaped(left.split()[4])), right.split()[0])
        if folder.is_relative_to(mount.point) and mount.point.is_relative_to(found.point):
            found = mount
    return found


def check_disk(folder: Path, needed: int) -> None:
    """Refuse a folder that is in memory, or on a disk that is too full for what is going to be written."""
    mount = mount_of(folder.resolve(), Path("/proc/self/mountinfo").read_text())
    remedy = "Set TMPDIR to a folder on a disk"
    if mount.kind in IN_MEMORY:
        raise RequestError(
            f"the folder for temporary files, {folder}, is in memory ({mount.kind} at {mount.point}), so saves there "
            f"would tell nothing about a disk. {remedy}."
        )
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise RequestError(
            f"the folder for temporary files, {folder}, has {free:,} bytes left, and the benchmark writes up to "
            f"{needed:,}. {remedy} that has more, or measure a smaller state with --size, such as "
            f"{size_in_words(64 << 20)}."
        )


def write_raw(folder: Path, content: memoryview) -> float:
    """Seconds from nothing to these bytes in a file that has been fsynced: what no save can undercut."""
    path = folder / "raw"
    began = perf_counter()
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(content), _PIECE):
            file.write(content[start : start + _PIECE])
        os.fsync(file.fileno())
    seconds = perf_counter() - began
    path.unlink()
    return seconds


def read_raw(files: Iterable[Path]) -> float:
    """Seconds until all bytes of these files are in memory that was not there before."""
    began = perf_counter()
    read = []
    for path in files:
        content = memoryview(_fresh_memory(path.stat().st_size))
        with path.open("rb", buffering=0) as file:
            start = 0
            while count := file.readinto(content[start : start + _PIECE]):
                start += count
        read.append(content)
    return perf_counter() - began


def forget(files: Sequence[Path]) -> None:
    """Have the next read of these files come from the disk. They must have been written there already."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # what is not on the disk yet would stay in memory
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def files_in(path: Path) -> list[Path]:
    """All files of a checkpoint, be it a folder or a file."""
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


def _fresh_memory(size: int) -> mmap.mmap:
    """Of no content yet, and in huge pages where there are some: without them, faults would take half of the time."""
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # of a kernel that has none
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _unescaped(point: str) -> str:
    """The kernel writes a blank as a backslash and three octal digits."""
    return point.encode().decode("unicode_escape").encode("latin-1").decode()
