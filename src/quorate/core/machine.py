"""What this process may use of its machine, or of the container that it runs in: cores and memory."""

import contextlib
import ctypes
import errno
import math
import mmap
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_KEPT = 32 * 2**20  # more is refused
UNLIMITED = 2**60  # version 1 has no word for it, but a number that no machine reaches


def usable_cores() -> int:
    """The cores that this process may run on, or fewer where its container is given less time than that."""
    return cores_within(len(os.sched_getaffinity(0)), read_limits().cores)


def cores_within(allowed: int, quota: float | None) -> int:
    """Whole cores: a worker that is given half a core's time makes all others wait for it at every step."""
    return allowed if quota is None else max(1, min(allowed, math.floor(quota)))


def machine_memory() -> int:
    """Bytes that can be had on this machine without taking them from anybody."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) * 1024
    return sys.maxsize  # a kernel that does not tell


def free_memory() -> int:
    """The same, and not more than this process's container is given."""
    inside = read_limits().free_memory
    return machine_memory() if inside is None else min(inside, machine_memory())


def is_shortage(error: BaseException) -> bool:
    """Whether an error tells that memory could not be had, be it of Python, of the kernel, of torch or of a GPU."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    words = str(error) if isinstance(error, RuntimeError) else ""
    told = ("DefaultCPUAllocator", os.strerror(errno.ENOMEM), "CUDA out of memory", "CUDA error: out of memory")
    is_torchs = any(each in words for each in told)
    return is_torchs or isinstance(error, MemoryError)


def why_no_thread(error: BaseException) -> str:
    """What to say where no thread could be started; nothing of other errors."""
    if not isinstance(error, RuntimeError) or "can't start new thread" not in str(error):
        return ""
    return (
        "no thread could be started: this machine or container limits memory (ulimit -v) or the number of processes "
        "(ulimit -u) to less than the job needs. Raise the limit, or use fewer workers."
    )


def fresh_memory(size: int, *, is_inherited: bool = True) -> memoryview:
    """Memory that nobody else has, not filled with anything yet: to zero it first would cost as much as to fill it.

    In huge pages where there are some: with small ones, half of the time goes into faults. What is not inherited is
    not there in a process that is forked.
    """
    if not size:
        return memoryview(bytearray())
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # of a kernel that has none
        memory.madvise(mmap.MADV_HUGEPAGE)
    if not is_inherited:
        memory.madvise(mmap.MADV_DONTFORK)
    return memoryview(memory)


def keep_freed_memory(size: int) -> None:
    """Have malloc keep so much of what is freed in this process, for what is taken next.

    A process that takes and frees the same amount over and over, such as the samples of a batch, otherwise gives it
    back to the kernel each time, and half of its time goes into faults. Without effect where malloc is not glibc's.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, ctypes.c_int(min(size, 2**31 - 1)))
        # What is larger is mapped by itself, and given back when it is freed.
        libc.mallopt(_M_MMAP_THRESHOLD, ctypes.c_int(_LARGEST_KEPT))


# --- the limits of its control groups, versions 1 and 2


@dataclass(frozen=True)
class Limits:
    """None where there is no limit: how many cores' worth of time, and how much memory in all and still free."""

    cores: float | None = None
    memory: int | None = None
    free_memory: int | None = None


def read_limits(root: Path = ROOT, membership: Path = MEMBERSHIP) -> Limits:
    """The tightest limits on the way from this process's groups up to the root."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return Limits()
    folders = [folder for line in lines for folder in _folders(root, line)]
    quotas = [quota for quota in map(_quota, folders) if quota is not None]
    limits = [limit for limit in map(_memory, folders) if limit is not None]
    return Limits(
        cores=min(quotas, default=None),
        memory=min((limit for limit, _ in limits), default=None),
        free_memory=min((free for _, free in limits), default=None),
    )


def _folders(root: Path, line: str) -> Iterator[Path]:
    """A group's folder and all above it, by a line such as ``4:memory:/docker/3f2`` (1) or ``0::/docker/3f2`` (2).

    In a container the path may be the host's, of which only the root can be seen.
    """
    _, _, rest = line.partition(":")
    controllers, _, path = rest.partition(":")
    top = root / controllers
    folder = top / path.lstrip("/")
    while folder != top and top in folder.parents:
        yield folder
        folder = folder.parent
    yield top


def _quota(folder: Path) -> float | None:
    quota, period = _number(folder / "cpu.max"), _number(folder / "cpu.max", position=1)
    if quota is None:
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota and period else None


def _memory(folder: Path) -> tuple[int, int] | None:
    """The limit, and what of it is free: what is kept of files counts as free, as the kernel gives it up when asked."""
    for limit_file, usage_file, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        limit = _number(folder / limit_file)
        if limit is not None and limit < UNLIMITED:
            words: list[str] = []
            with contextlib.suppress(OSError):
                words = (folder / "memory.stat").read_text().split()
            amounts = dict(zip(words[::2], words[1::2], strict=False))
            kept = sum(int(amounts.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
            used = (_number(folder / usage_file) or 0) - kept
            return limit, min(limit, max(0, limit - used))
    return None


def _number(file: Path, position: int = 0) -> int | None:
    """A number in a file; None for the words of no limit, `max` and -1, and where there is no such file."""
    with contextlib.suppress(OSError):
        words = file.read_text().split()
        return int(words[position]) if len(words) > position and words[position].isdecimal() else None
    return None
