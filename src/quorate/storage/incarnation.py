"""Numbers that only grow, whatever dies in between: one line a number, in a file that is only appended to."""

import contextlib
import fcntl
import os
from pathlib import Path

from quorate.core.regular_file import open_regular
from quorate.storage.atomic import sync_folder, write_fully


def take_next(file: Path, above: int = 0) -> int:
    """The next number, on the disk before it is returned; higher than `above`, too."""
    descriptor = open_regular(file, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        # Two that ask at once must not be told the same number: both would believe to be the newest.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        lines = os.read(descriptor, os.fstat(descriptor).st_size).split(b"\n")
        number = max(above, *map(_number, lines)) + 1
        # A line that a crash has torn is ended first: "1" and "2" must not become 12.
        write_fully(descriptor, b"%s%d\n" % (b"\n" if lines[-1] else b"", number))
        os.fsync(descriptor)
        sync_folder(file.parent)
    finally:
        os.close(descriptor)
    return number


def _number(line: bytes) -> int:
    with contextlib.suppress(ValueError):
        return int(line)
    return 0
