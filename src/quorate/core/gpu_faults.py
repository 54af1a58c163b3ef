"""Faults of a GPU that no process survives which computes on it: every later call gives the same error again.

CUDA tells them as the text of an exception, at whatever call comes next. So they are known by their text, wherever in a
chain of exceptions it stands. An assertion in a kernel is none of them, though it is as final: it says that the user's
code has gone wrong, as an index that is out of range does. Nor is a want of memory, from which a process recovers.
"""

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator

_TOLD = re.compile(r"(?:CUDA (?:driver )?error|Triton Error \[CUDA\]): ([^\n]+)", re.IGNORECASE)
_LIBRARY = re.compile(r"\b(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|CUFFT)_(?:STATUS_)?[A-Z]+")
_FATAL = re.compile(
    r"illegal memory access|illegal address|misaligned address|illegal instruction|invalid program counter"
    r"|hardware stack error|unspecified launch failure|launch timed out|launch timeout|uncorrectable|\becc\b|nvlink"
    r"|fallen off the bus|(?:device|gpu)(?: is| was)? (?:lost|unavailable)|is/are busy or unavailable"
    r"|shared address space|context is destroyed|no CUDA-capable device|async error has occur|tensor memory"
    r"|unknown error",
    re.IGNORECASE,
)
_XID = re.compile(r"NVRM: Xid \(([^)]*)\): (\d+)(?:, pid='?(\d+|<unknown>)'?)?")
_STAMP = re.compile(r"\[\s*(\d+\.\d+)\]")
_MEANINGS = {
    13: "an exception of the graphics engine",
    31: "a page fault of its memory",
    43: "it stopped processing",
    45: "what a process had begun was cleaned up",
    48: "an error of two bits in its memory (ECC)",
    62: "its microcontroller halted",
    63: "a row of its memory was remapped",
    64: "a row of its memory could not be remapped",
    74: "an error of NVLink",
    79: "it has fallen off the bus",
    92: "many errors of single bits in its memory (ECC)",
    94: "an error in its memory, contained (ECC)",
    95: "an error in its memory, not contained (ECC)",
    119: "its system processor does not answer",
    120: "an error of its system processor",
}
"""What NVIDIA's list says of the numbers that its driver notes."""
PATIENCE = 2.0
RECENT = 60.0
"""Seconds for which a line of the kernel's log may be about the fault at hand: it keeps those of weeks."""


def cuda_error_of(error: BaseException, wait: Callable[[], None] | None = None) -> str | None:
    """The fault of a GPU that an exception tells of, or one that it came from; None if it is about something else.

    Libraries such as cuBLAS tell only that they have failed. `wait`, for all that was begun on the GPU, has it say why.
    """
    for each in _chain(error):
        told = _TOLD.search(str(each))
        if told is not None and _FATAL.search(told[1]):
            return told[1].strip().rstrip(".")
    if wait is not None and any(_LIBRARY.search(str(each)) for each in _chain(error)):
        try:
            wait()
        except Exception as answer:
            return cuda_error_of(answer)
    return None


def xid_of(lines: Iterable[str], pid: int, since: float = 0.0) -> str | None:
    """What the driver has noted in the kernel's log, the newest last: of this process, or of no certain one.

    `since`: seconds after the start of the machine before which nothing counts, where the lines tell when they are of.
    """
    found = None
    for line in lines:
        stamp = _STAMP.match(line)
        if stamp is not None and float(stamp[1]) < since:
            continue
        noted = _XID.search(line)
        if noted is not None and noted[3] in (None, "<unknown>", str(pid)):
            number = int(noted[2])
            meaning = f": {_MEANINGS[number]}" if number in _MEANINGS else ""
            found = f"Xid {number} of {noted[1]}{meaning}"
    return found


def describe_fault(told: str) -> str:
    """The sentence of a worker whose GPU has failed, with what the kernel's log says of it, if one may read that."""
    xid = xid_of(_kernel_log(), os.getpid(), time.monotonic() - RECENT)
    return f"its GPU has failed: {told}" + (f" ({xid})." if xid else ".")


def _kernel_log() -> list[str]:
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=PATIENCE, check=False)
    except (OSError, subprocess.SubprocessError):  # most containers have none, or hide it
        return []
    return done.stdout.splitlines()


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        each = waiting.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [other for other in (each.__context__, each.__cause__) if other is not None]
