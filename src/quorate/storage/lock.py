"""A file that one process holds at a time, and that its death sets free."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

_held: set[int] = set()


class FolderInUse(Exception):  # noqa: N818 (a happening, not a mistake)
    """Another process holds the lock; its text says which."""


@contextlib.contextmanager
def hold(file: Path) -> Iterator[None]:
    """Hold the lock while the block runs."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    _held.add(descriptor)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderInUse(_holder(descriptor)) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        _let_go(descriptor)


def _let_go(descriptor: int) -> None:
    # In a forked child it is closed already, and its number may by now be another file's.
    if descriptor in _held:
        _held.remove(descriptor)
        os.close(descriptor)


def _holder(descriptor: int) -> str:
    pid = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
    return f"process {pid}" if pid else "another process"


def _close_in_child() -> None:
    # A lock lives as long as any copy of its descriptor: a forked child that outlives the launcher would keep the run.
    for descriptor in tuple(_held):
        _let_go(descriptor)


os.register_at_fork(after_in_child=_close_in_child)
