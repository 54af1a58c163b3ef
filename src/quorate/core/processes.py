"""What the standard library does not offer about processes."""

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends, whatever way it does.

    `parent` is who it should be: it may have died before this was called.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, in place of the first process of the machine."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children_of(parent: int) -> dict[int, int]:
    """The children of a process by their pids, each with its process group; those that are dead and not reaped too."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may hold anything.
            _, its_parent, group = entry.read_text(errors="replace").rpartition(")")[2].split()[:3]
        except (OSError, ValueError):  # it has just gone
            continue
        if int(its_parent) == parent:
            found[int(entry.parent.name)] = int(group)
    return found


def describe_departure(code: int) -> str:
    """What an exit code, negative for a signal, says: "was killed by SIGKILL", "exited with code 3"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


_LIKELY_CAUSES = {
    signal.SIGKILL: " Often it is the kernel that kills like this, when memory runs out: see `dmesg`; fewer workers or"
    " a smaller batch_size need less.",
    signal.SIGSEGV: " That is a crash in native code: an extension module, or a library built for another machine.",
    signal.SIGBUS: " That is a mapped file that was cut short, or shared memory that ran out.",
    signal.SIGILL: " That is a library built for another processor.",
}


def likely_cause(code: int | None) -> str:
    """What a death by that signal, a negative exit code, often comes from: a sentence to add, or nothing."""
    return next((hint for known, hint in _LIKELY_CAUSES.items() if code == -known), "")
