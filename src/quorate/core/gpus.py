"""The GPUs of this machine, without speaking to their driver (whoever forks must not have), and those of their faults
that end a process."""

import importlib.util
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

_DEVICE = re.compile(r"nvidia\d+")
VISIBLE = "CUDA_VISIBLE_DEVICES"
PATIENCE = 5.0
_LOG_PATIENCE = 2.0
_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*(\S+)", re.MULTILINE)
_DRIVER = re.compile(r"^NVRM version:.*?\s(\d+\.[\d.]+)\s", re.MULTILINE)


def gpus_here(devices: Path = Path("/dev")) -> tuple[str, ...]:
    """Those that a process may use, as `CUDA_VISIBLE_DEVICES` names them: all, or what that variable leaves of them."""
    there = sum(_DEVICE.fullmatch(path.name) is not None for path in devices.glob("nvidia*"))
    visible = os.environ.get(VISIBLE)
    if visible is None:
        # Counted, whatever the names of their files: in a container that was given nvidia3 alone, CUDA calls it 0.
        return tuple(map(str, range(there)))
    named = (part.strip() for part in visible.split(","))
    return tuple(name for name in named if name not in ("", "-1")) if there else ()


def use_gpu(name: str) -> None:
    """Have this process see no other. Before anything speaks to the driver."""
    os.environ[VISIBLE] = name


@cache
def torch_has_cuda() -> bool:
    """Whether the torch that is installed was built for GPUs: by its text, since to import it takes seconds."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    try:
        built_for = _CUDA.search((Path(found.origin).parent / "version.py").read_text())
    except OSError:
        return True  # of another make: whoever computes there finds out
    return built_for is None or built_for[1] != "None"


def driver_here(version: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The version of the driver; empty where there is none, or where it does not tell."""
    try:
        found = _DRIVER.search(version.read_text())
    except OSError:
        return ""
    return found[1] if found else ""


def users_of(gpu: str) -> str:
    """Who computes on a GPU, the largest first: process 4711 (python) has 70,000 MiB. Empty where nvidia-smi does not
    tell, as in most containers."""
    listed = [
        [part.strip() for part in line.split(",")] for line in _ask("compute-apps=pid,process_name,used_memory", gpu)
    ]
    users = [(int(used), pid, name) for pid, name, used in (row for row in listed if len(row) == 3) if used.isdecimal()]
    return ", ".join(f"process {pid} ({Path(name).name}) has {used:,} MiB" for used, pid, name in sorted(users)[::-1])


def memory_of(gpu: str) -> int | None:
    """Bytes of a GPU's memory; None where nvidia-smi does not tell."""
    told = _ask("gpu=memory.total", gpu)
    return int(told[0]) * 2**20 if told and told[0].isdecimal() else None


def _ask(query: str, gpu: str) -> list[str]:
    command = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits", "-i", gpu]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


# --- faults that no process survives which computes on the GPU: every later call gives the same error again
#
# CUDA tells them as the text of an exception, at whatever call comes next. So they are known by their text, wherever in
# a chain of exceptions it stands. An assertion in a kernel is none of them, though it is as final: it says that the
# user's code has gone wrong, as an index that is out of range does. Nor is a want of memory, from which a process
# recovers.

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
        done = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=_LOG_PATIENCE, check=False)
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
