"""Asking a forked process: whatever the question touches is left behind in it."""

import gc
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from quorate.core.processes import describe_departure, die_with_parent

_PIECE = 1 << 16


@dataclass(frozen=True)
class Answer:
    """What a child has said, and how it ended: "exited with code 1", "was killed by SIGKILL", "took too long"."""

    text: str
    ending: str


def ask_child(question: Callable[[], str], seconds: float | None = None) -> Answer:
    """Call `question` in a forked process, for so many seconds at most.

    The text is empty if the process did not come to an answer. An exception in it is printed to standard error.
    """
    sys.stdout.flush()
    receiving, sending = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _answer(question, sending, parent)
    os.close(sending)
    over = None if seconds is None else time.monotonic() + seconds
    in_time = False
    try:
        text, in_time = _read(receiving, over)
    finally:  # neither the pipe nor the child outlives the question, whatever interrupts it
        os.close(receiving)
        if not in_time:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    ending = describe_departure(code) if in_time else f"took longer than {seconds} s"
    return Answer(text if code == 0 else "", ending)


def _answer(question: Callable[[], str], sending: int, parent: int) -> NoReturn:
    code = 1
    try:
        # What the parent has left to be collected may wait, when it is, for threads that this process does not have.
        gc.freeze()
        die_with_parent(parent)
        rest = memoryview(question().encode())
        while rest:
            rest = rest[os.write(sending, rest) :]
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())  # nobody above is left to do it: this frame ends the process
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _read(receiving: int, over: float | None) -> tuple[str, bool]:
    """All that comes until the other end is closed, and whether it was closed in time."""
    pieces: list[bytes] = []
    pipe = select.poll()  # which, unlike select, takes descriptors above 1023
    pipe.register(receiving, select.POLLIN)
    while True:
        remaining = None if over is None else max(0.0, over - time.monotonic()) * 1000
        if not pipe.poll(remaining):
            return "", False
        piece = os.read(receiving, _PIECE)
        if not piece:
            return b"".join(pieces).decode(), True
        pieces.append(piece)
