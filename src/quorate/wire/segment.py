"""Memory that the processes of one host share. It has no name: it is gone with the last process that holds it."""

import contextlib
import errno
import fcntl
import mmap
import os

from quorate.core.cgroup import Limits, read_limits
from quorate.core.errors import FrameError, OutOfMemory
from quorate.core.memory import machine_memory

# Whoever holds the memory could otherwise cut it short under the others, who would die of SIGBUS.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Segment:
    """A piece of shared memory, by its descriptor, which can be passed to another process."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor = descriptor
        self.size = size

    @classmethod
    def create(cls, size: int, available: int | None = None, limits: Limits | None = None) -> "Segment":
        """All of it is there when this returns: too little memory is an error now, not a signal at the first write."""
        # Asked first: the kernel would hand out pages until it has to kill somebody, in a container as on the machine.
        free = machine_memory() if available is None else available
        if size > free:
            raise _too_little(size, f"{free:,} are free")
        inside = (read_limits() if limits is None else limits).free_memory
        if inside is not None and size > inside:
            raise _too_little(size, f"{inside:,} are free of what this container is given")
        descriptor = os.memfd_create("quorate", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(descriptor, 0, max(size, 1))
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            os.close(descriptor)
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise _too_little(size, os.strerror(error.errno)) from error
        return cls(descriptor, size)

    @classmethod
    def adopt(cls, descriptor: int, size: int) -> "Segment":
        """What another process has passed; it is refused unless it is this large and will stay so."""
        given = os.fstat(descriptor).st_size
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        if given != max(size, 1) or not sealed:
            os.close(descriptor)
            raise FrameError(
                f"a worker shared {given:,} bytes of memory where {size:,} were expected"
                if sealed
                else "a worker shared memory that it could take away again"
            )
        return cls(descriptor, size)

    def shared(self) -> mmap.mmap:
        """A view in which everybody's writes are seen by everybody."""
        return mmap.mmap(self.descriptor, max(self.size, 1))

    def private(self) -> mmap.mmap:
        """A view in which everybody's writes are seen, until this process writes there itself: those stay its own."""
        return mmap.mmap(self.descriptor, max(self.size, 1), flags=mmap.MAP_PRIVATE)

    def close(self) -> None:
        """Let go of the descriptor; views stay until they are dropped."""
        with contextlib.suppress(OSError):
            os.close(self.descriptor)


def _too_little(size: int, why: str) -> OutOfMemory:
    return OutOfMemory(
        f"there is not enough memory for the {size:,} bytes of gradients that the workers of this host share ({why}); "
        "run fewer `workers`, or set `links: tcp`."
    )
