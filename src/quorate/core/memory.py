"""Memory: how much there is to be had, and having it."""

import contextlib
import errno
import mmap
import os
import sys
from pathlib import Path

from quorate.core.cgroup import read_limits


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
    """Whether an error tells that memory could not be had, be it of Python, of the kernel or of torch."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    words = str(error) if isinstance(error, RuntimeError) else ""
    is_torchs = "DefaultCPUAllocator" in words or os.strerror(errno.ENOMEM) in words
    return is_torchs or isinstance(error, MemoryError)


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
