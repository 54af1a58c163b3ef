"""A file that one process holds at a time, and that its death sets free."""

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quorate.core.errors import RunError
from quorate.core.regular_file import open_regular
from quorate.storage.atomic import explaining, sweep

# Type, from where, start, length, process: what the kernel calls a struct flock. It covers the whole file.
_RECORD = struct.Struct("hhqqi4x")
_EXCLUSIVE = _RECORD.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)

_held: set[int] = set()


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock, by its number if it has written it already."""

    pid: int | None

    def __str__(self) -> str:
        return "another process" if self.pid is None else f"process {self.pid}"


class FolderInUse(Exception):  # noqa: N818 (a happening, not a mistake)
    """Another process holds the lock; its text says which."""


@contextlib.contextmanager
def hold(file: Path) -> Iterator[None]:
    """Hold the lock while the block runs."""
    descriptor = open_regular(file, os.O_RDWR | os.O_CREAT)
    _held.add(descriptor)
    try:
        try:
            # Of the open file and not of the process: a lock of this kind can be asked about without taking it.
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _EXCLUSIVE)
        except BlockingIOError:
            raise FolderInUse(str(_holder(descriptor))) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        _let_go(descriptor)


def holder_of(file: Path) -> Holder | None:
    """Who holds the lock, if anybody does.

    It is only asked about, never taken, not even for a moment: a launcher that starts just then must not find it held.
    """
    try:
        descriptor = open_regular(file)
    except FileNotFoundError:
        return None
    try:
        kind = _RECORD.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _EXCLUSIVE))[0]
        return None if kind == fcntl.F_UNLCK else _holder(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class FolderLock:
    """The lock of a run or a search: what it is called, and how its holder is made to leave."""

    file: Path
    what: str
    remedy: str

    def holder(self) -> Holder | None:
        """Who is at work there, if anybody is."""
        with explaining(f"cannot look at the lock of {self.what} in {self.file.parents[1]}"):
            return holder_of(self.file)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep every other process out while the block runs, for as long as this process lives at most. What others
        have left half-written, who were killed before or meanwhile, is swept."""
        with contextlib.ExitStack() as stack:
            try:
                with explaining(f"cannot lock {self.what} in {self.file.parents[1]}"):
                    stack.enter_context(hold(self.file))
            except FolderInUse as in_use:
                raise RunError(f"{self.what} is in use by {in_use}; wait for it to end, or {self.remedy}") from None
            sweep(self.file.parent)
            stack.callback(sweep, self.file.parent)
            yield


def _let_go(descriptor: int) -> None:
    # In a forked child it is closed already, and its number may by now be another file's.
    if descriptor in _held:
        _held.remove(descriptor)
        os.close(descriptor)


def _holder(descriptor: int) -> Holder:
    written = os.pread(descriptor, 32, 0).strip()
    return Holder(int(written) if written.isdigit() else None)


def _close_in_child() -> None:
    # A lock lives as long as any copy of its descriptor: a forked child that outlives the launcher would keep the run.
    for descriptor in tuple(_held):
        _let_go(descriptor)


os.register_at_fork(after_in_child=_close_in_child)
