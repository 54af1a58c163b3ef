"""What this process may do, as the kernel tells it."""

from pathlib import Path

RIGHTS = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
"""Those that a benchmark may need, by their number. Root has them, but often not in a container."""


def effective_rights() -> frozenset[str]:
    """Those that this process has."""
    return rights_in(Path("/proc/self/status").read_text())


def rights_in(status: str) -> frozenset[str]:
    """Those that the kernel's page about a process tells."""
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return frozenset(right for right, number in RIGHTS.items() if int(value, 16) >> number & 1)
    return frozenset()
