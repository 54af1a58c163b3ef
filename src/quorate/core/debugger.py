"""Whether somebody steps through the user's code in this process, and what a breakpoint says where nobody can."""

import bdb
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from quorate.core.errors import DebuggerQuit

REMEDY = (
    "A worker has no terminal for a debugger. Type `quorate train job.yaml --debug`, or write "
    "quorate.train(job, debug=True): the job runs in one process, at your terminal, to the same bits."
)

# Of a process: it is the process that stands still at a breakpoint.
_is_attached = False


def is_attached() -> bool:
    """Whether the user's code runs in the process that the user has started, to be stepped through."""
    return _is_attached


@contextmanager
def attached() -> Iterator[None]:
    """For a `with` block around a job that is debugged in this process."""
    global _is_attached
    _is_attached = True
    try:
        yield
    finally:
        _is_attached = False


def refuse_breakpoints() -> None:
    """In a worker: have `breakpoint()` say how to debug. What PYTHONBREAKPOINT names may need no terminal."""
    if not os.environ.get("PYTHONBREAKPOINT"):
        sys.breakpointhook = _refuse


def _refuse(*_: object, **__: object) -> NoReturn:
    raise RuntimeError(f"breakpoint() in a worker. {REMEDY}")


def quit_in(error: BaseException, where: str) -> DebuggerQuit | None:
    """What to raise where a person has left the debugger (`q`, Ctrl-D) in the user's code; None for anything else."""
    if _is_attached and isinstance(error, bdb.BdbQuit):
        return DebuggerQuit(f"the debugger was quit in {where}, and the job with it; any checkpoint so far is kept.")
    return None
