"""Which coordinator of a run is the newest: each takes the next number, and of two that want it one alone gets it.

A coordinator that was moved to another host may still live behind a cut cable. Whoever writes to the run looks here
first: a higher number than its own means that another one does so now.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from quorate.core.regular_file import read_regular
from quorate.storage.atomic import sync_folder, write_new_file
from quorate.storage.objects import ObjectStore, StoreError


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
            return max((int(name) for name in self._names() if name.isdigit()), default=0)
        except (OSError, StoreError):
            return 0

    def _names(self) -> Iterable[str]:
        if (store := self._stored()) is not None:
            return store.below(self._folder.name).names()
        # Listed: a network file system asks its server then, and may answer for a single name from memory.
        return os.listdir(self._folder)  # noqa: PTH208

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
