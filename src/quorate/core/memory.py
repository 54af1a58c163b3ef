"""How much memory there is to be had."""

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
