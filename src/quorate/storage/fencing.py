"""Who may write to a run: one launcher, by a lock that its death sets free, and of its coordinators the newest.

A coordinator that was moved to another host may still live behind a cut cable. Whoever writes to the run looks first: a
higher number than its own means that another one does so now.
"""

import contextlib
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from quorate.core.errors import RunError
from quorate.core.regular_file import open_regular, read_regular
from quorate.storage.atomic import explaining, sweep, sync_folder, write_new_file
from quorate.storage.objects import ObjectStore, StoreError

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


class Incarnations:
    """A file for each number, in the place that all hosts of the run share: a folder or, where `stored` gives one, an
    object store. The file tells for which launch of the run it was taken."""

    def __init__(self, folder: Path, stored: Callable[[], ObjectStore | None] = lambda: None) -> None:
        self._folder = folder
        self._stored = stored

    def take(self, above: int = 0, launch: str = "") -> int:
        """A number higher than any that was taken before, and than `above`; on the disk before it is returned.

        To create what must not exist is the one thing that two hosts cannot both do, on every kind of shared folder;
        locks are not kept by all of them. Object stores have the same as a conditional put.
        """
        number = max(above, self.newest()) + 1
        if (store := self._stored()) is not None:
            while not store.create(f"{self._folder.name}/{number}", launch.encode()):
                number += 1
            return number
        self._folder.mkdir(exist_ok=True)
        while True:
            try:
                write_new_file(self._folder / str(number), [launch.encode()])
                break
            except FileExistsError:
                number += 1
        sync_folder(self._folder)
        return number

    def newest(self) -> int:
        """The highest that was taken; 0 if none was. A folder that cannot be read says nothing: nor can whoever asks
        write there."""
        try:
            store = self._stored()
            # Listed: a network file system asks its server then, and may answer for a single name from memory.
            names: Iterable[str] = (
                os.listdir(self._folder) if store is None else store.below(self._folder.name).names()  # noqa: PTH208
            )
            return max((int(name) for name in names if name.isdigit()), default=0)
        except (OSError, StoreError):
            return 0

    def is_taken_by_other(self, launch: str) -> bool:
        """Whether the newest is of another launch of the run, as far as that is known."""
        name = str(self.newest())
        try:
            if (store := self._stored()) is not None:
                newest = store.read(f"{self._folder.name}/{name}").decode()
            else:
                newest = read_regular(self._folder / name).decode()
        except (OSError, ValueError, StoreError):
            return False
        return newest not in ("", launch)


class IncarnationWatch:
    """The newest incarnation as of a moment ago, for one who asks at every turn and must not wait for a store."""

    def __init__(self, incarnations: Incarnations, every: float) -> None:
        self._incarnations = incarnations
        self._every = every
        self._newest = 0
        threading.Thread(target=self._look, name="incarnations", daemon=True).start()

    def newest(self) -> int:
        return self._newest

    def _look(self) -> None:
        while True:
            self._newest = max(self._newest, self._incarnations.newest())
            time.sleep(self._every)
