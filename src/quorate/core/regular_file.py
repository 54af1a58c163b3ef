"""Files that are files: a FIFO, a socket or a device in the place of one is told at once, and never waited for."""

import errno
import io
import os
import stat
from pathlib import Path

_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def open_regular(path: Path, flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
    """A descriptor of a file, or of what a link leads to; raises `OSError` for anything that is not a file.

    Whoever opens a FIFO waits until somebody writes to it, which may be never: without O_NONBLOCK a run in which one
    lies could hold up every command that looks at it.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a FIFO that nobody reads
            raise _not_a_file("a socket or a FIFO", path) from None
        raise
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind == stat.S_IFREG:
        return descriptor
    os.close(descriptor)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise _not_a_file(_KINDS.get(kind, "something else"), path)


def opened_regular(path: Path) -> io.BufferedReader:
    """The same as a file to read from."""
    return io.BufferedReader(io.FileIO(open_regular(path)))


def read_regular(path: Path) -> bytes:
    """All of a file."""
    with io.FileIO(open_regular(path)) as file:
        return file.readall()


def _not_a_file(what: str, path: Path) -> OSError:
    return OSError(errno.EINVAL, f"{what} is in the place of the file", str(path))
