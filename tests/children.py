"""What a forked process does in the place of the test: limits, signals and threads of its own stay there."""

import os
from collections.abc import Callable


def begin_in_child(work: Callable[[], object]) -> int:
    """Begin a process that ends with 0, or with 1 if the work gives False, or with 2 if it raises; its pid."""
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            code = int(work() is False)
        finally:
            os._exit(code)
    return pid


def code_of(pid: int) -> int:
    """How it has ended: its exit code, or the number of the signal with a minus sign."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_child(work: Callable[[], object]) -> int:
    """Do it in a process, and wait for its end."""
    return code_of(begin_in_child(work))
