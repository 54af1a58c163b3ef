"""What the kernel lets a process do, tried in a process of its own: forking is for processes with one thread."""

import ctypes
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable

from quorate.core.user_code import describe

_PR_SET_PDEATHSIG = 1


def probe_kernel(patience: float) -> dict[str, str]:
    """Start the process: what went wrong with each feature, nothing where all is well."""
    command = [sys.executable, "-P", "-m", "quorate.doctor.kernel_probe"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=patience, check=True)
    answer: dict[str, str] = json.loads(done.stdout)
    return answer


def try_features() -> dict[str, str]:
    """Try each feature."""
    return {name: _trouble(attempt) for name, attempt in FEATURES.items()}


def _trouble(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except Exception as error:
        return describe(error)
    return ""


def _fork() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if status != 0:
        raise OSError(f"the child ended with status {status}")


def _pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _memfd() -> None:
    descriptor = os.memfd_create("quorate-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, 4096)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    finally:
        os.close(descriptor)


def _death_signal() -> None:
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0) != 0:
        raise OSError("prctl has refused it")


FEATURES = {"fork": _fork, "pidfd": _pidfd, "parent-death signal": _death_signal, "memfd": _memfd}

if __name__ == "__main__":
    print(json.dumps(try_features()))
