"""What the standard library does not offer about processes: whose they are, how they end, and asking a forked one."""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from quorate.core.timing import WatchedTime

SYSTEM_FOLDERS = "/usr/sbin:/sbin"
"""Where programs for root are; not everybody's PATH has them."""

_sockets: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends, whatever way it does.

    `parent` is who it should be: it may have died before this was called.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def outlive_parent() -> None:
    """Take back `die_with_parent`."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, in place of the first process of the machine."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def close_in_children(sock: socket.socket) -> None:
    """Have every process that is forked from now on close its copy of a socket. The original is not disturbed.

    A data loader's process is a copy of its worker, descriptors included. If it outlives the worker, the copies keep
    the worker's connections open, and its peers learn of its death seconds late.
    """
    _sockets.add(sock)


def keep_in_children(sock: socket.socket) -> None:
    """Take back `close_in_children`."""
    _sockets.discard(sock)


def _close_copies() -> None:
    for sock in list(_sockets):
        sock.close()


os.register_at_fork(after_in_child=_close_copies)


def show_as(name: str, run: str) -> None:
    """Have `ps` and `top` show this process as this part of a run; where the library is not installed, as it was."""
    with contextlib.suppress(ImportError):
        # By itself it would also write over the environment that others see of the process.
        os.environ["SPT_NOENV"] = "1"
        from setproctitle import setproctitle

        setproctitle(f"quorate: {name} of {run}" if run else f"quorate: {name}")


def children_of(parent: int, proc: Path = Path("/proc")) -> dict[int, int]:
    """The children of a process by their pids, each with its process group; those that are dead and not reaped too."""
    stats = ((pid, _stat(proc, pid)) for pid in _candidates(parent, proc))
    return {pid: stat.group for pid, stat in stats if stat is not None and stat.parent == parent}


def members_of(session: int, groups: Collection[int], proc: Path = Path("/proc")) -> set[int]:
    """The processes that run in any of these process groups of a session."""
    stats = ((pid, _stat(proc, pid)) for pid in _all_pids(proc))
    return {
        pid
        for pid, stat in stats
        if stat is not None and stat.session == session and stat.group in groups and stat.state not in "ZX"
    }


def has_open(pid: int, file: Path, proc: Path = Path("/proc")) -> bool:
    """Whether a process has a file open. Raises FileNotFoundError if there is no such process, and PermissionError if
    it is another user's."""
    wanted = file.stat()
    for descriptor in (proc / str(pid) / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.path.samestat(descriptor.stat(), wanted):
                return True
    return False


def is_stopped(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether a process is stopped, by SIGSTOP say. One that a debugger holds is not: somebody looks at it."""
    stat = _stat(proc, pid)
    return stat is not None and stat.state == "T"


class StoppedProcesses:
    """Tells processes that are stopped from those that take their time: for how long nothing of them has run.

    For those of whom nothing else tells it. Looked at now and then.
    """

    def __init__(self, limit: float, is_stopped: Callable[[int], bool] = is_stopped) -> None:
        self._limit = limit
        self._is_stopped = is_stopped
        self._times: dict[int, WatchedTime] = {}

    def look(self, now: float, pids: Iterable[int]) -> dict[int, float]:
        """Those of these that have been stopped for longer than the limit, and for how many seconds."""
        self._times = {pid: self._times.get(pid) or WatchedTime(now) for pid in pids if self._is_stopped(pid)}
        seconds = {pid: watched.look(now, self._limit) for pid, watched in self._times.items()}
        return {pid: stopped for pid, stopped in seconds.items() if stopped >= self._limit}


@dataclass(frozen=True)
class _Stat:
    state: str
    parent: int
    group: int
    session: int


def _stat(proc: Path, pid: int) -> _Stat | None:
    try:
        # The name, in parentheses, may hold anything.
        fields = (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return _Stat(fields[0], *map(int, fields[1:4]))
    except (OSError, ValueError, IndexError, TypeError):  # it has just gone
        return None


def _candidates(parent: int, proc: Path) -> list[int]:
    """Pids among which all its children are: what each of its threads has started, where the kernel lists that."""
    try:
        lists = [(task / "children").read_text() for task in (proc / str(parent) / "task").iterdir()]
    except OSError:
        return _all_pids(proc)
    return [int(pid) for listed in lists for pid in listed.split()]


def _all_pids(proc: Path) -> list[int]:
    return [int(entry.name) for entry in proc.glob("[0-9]*")]


def find_program(name: str) -> str | None:
    """The path of a program; none if it is not installed."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), SYSTEM_FOLDERS]))


def describe_departure(code: int | None) -> str:
    """What an exit code, negative for a signal, says: "was killed by SIGKILL", "exited with code 3"."""
    if code is None:
        return "has ended"
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


@dataclass(frozen=True)
class Answer:
    """What a child has said, and how it ended: "exited with code 1", "was killed by SIGKILL", "took too long"."""

    text: str
    ending: str


def ask_child(question: Callable[[], str], seconds: float | None = None) -> Answer:
    """Call `question` in a forked process, for so many seconds at most.

    The text is empty if the process did not come to an answer. An exception in it is printed to standard error.
    """
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(question, sending, os.getpid()))
    text, in_time = "", False
    child.start()
    try:
        sending.close()
        if in_time := receiving.poll(seconds):
            with contextlib.suppress(EOFError):
                text = receiving.recv()
    finally:  # neither the pipe nor the child outlives the question, whatever interrupts it
        receiving.close()
        if not in_time:
            child.kill()
        child.join()
    ending = describe_departure(child.exitcode) if in_time else f"took longer than {seconds} s"
    child.close()
    return Answer(text, ending)


def _answer(question: Callable[[], str], sending: Connection, parent: int) -> NoReturn:
    # What the parent has left to be collected may wait, when it is, for threads that this process does not have.
    gc.freeze()
    die_with_parent(parent)
    sending.send(question())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads that the question has left are not waited for
