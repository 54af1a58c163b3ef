"""Which coordinator of a run is the newest: each takes the next number, and of two that want it one alone gets it.

A coordinator that was moved to another host may still live behind a cut cable. Whoever writes to the run looks here
first: a higher number than its own means that another one does so now.
"""

import os
from pathlib import Path

from quorate.core.regular_file import read_regular
from quorate.storage.atomic import sync_folder, write_new_file


class Incarnations:
    """A folder with a file for each number, in the place that all hosts of the run share. The file tells for which
    launch of the run it was taken."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def take(self, above: int = 0, launch: str = "") -> int:
        """A number higher than any that was taken before, and than `above`; on the disk before it is returned.

        To create what must not exist is the one thing that two hosts cannot both do, on every kind of shared folder;
        locks are not kept by all of them.
        """
        self._folder.mkdir(exist_ok=True)
        number = max(above, self.newest()) + 1
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
            # Listed: a network file system asks its server then, and may answer for a single name from memory.
            return max((int(name) for name in os.listdir(self._folder) if name.isdigit()), default=0)  # noqa: PTH208
        except OSError:
            return 0

    def is_taken_by_other(self, launch: str) -> bool:
        """Whether the newest is of another launch of the run, as far as that is known."""
        try:
            newest = read_regular(self._folder / str(self.newest())).decode()
        except (OSError, ValueError):
            return False
        return newest not in ("", launch)
