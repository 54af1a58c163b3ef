"""Memory that the processes of one host share, and the doorbells by which they say that something is in it.

The memory has no name: it is gone with the last process that holds it.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import select
import socket
import struct
from collections.abc import Callable
from typing import Any

from quorate.core.errors import FrameError, OutOfMemory
from quorate.core.generation import GenerationId
from quorate.core.machine import machine_memory, read_limits
from quorate.wire.link import Deadline
from quorate.wire.reception import pass_descriptors, receive_descriptors
from quorate.wire.stream import Closable, wait_for

LONGEST_MESSAGE = 32 * 1024
"""Bytes that a doorbell carries."""

_HEADER = struct.Struct("<qqQ")
# Whoever holds the memory could otherwise cut it short under the others, who would die of SIGBUS.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Segment:
    """A piece of shared memory, by its descriptor, which can be passed to another process."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor = descriptor
        self.size = size

    @classmethod
    def create(cls, size: int) -> "Segment":
        """All of it is there when this returns: too little memory is an error now, not a signal at the first write."""
        # Asked first: the kernel would hand out pages until it has to kill somebody, in a container as on the machine.
        free, inside = machine_memory(), read_limits().free_memory
        if size > free:
            raise _too_little(size, f"{free:,} are free")
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


class Doorbell(Closable):
    """A connection between two workers of one host: messages of at most `LONGEST_MESSAGE` bytes, numbered, both ways,
    that arrive in microseconds.

    A wait lets go of its core at once. Looking again and again would be a little faster where every worker has a core
    of its own, and several times slower where they share one: it keeps the others from what they are waited for.
    """

    def __init__(self, sock: socket.socket, peer: str, generation: GenerationId) -> None:
        super().__init__(peer, sock)
        self._socket = sock
        self._generation = (generation.incarnation, generation.number)
        self._sent = 0
        self._received = 0
        self._buffer = bytearray(_HEADER.size + LONGEST_MESSAGE)
        self._view = memoryview(self._buffer)

    def ring(self, message: bytes, deadline: Deadline) -> None:
        """Send a message; it is on its way when this returns."""
        self._sent += 1
        packet = _HEADER.pack(*self._generation, self._sent) + message
        self._use(self._socket.send, packet, select.POLLOUT, deadline)

    def answer(self, deadline: Deadline) -> bytes:
        size = self._use(self._socket.recv_into, self._buffer, select.POLLIN, deadline)
        if size < _HEADER.size:
            raise self._lost("it closed the connection")
        self._received += 1
        incarnation, number, sequence = _HEADER.unpack_from(self._buffer)
        if (incarnation, number, sequence) != (*self._generation, self._received):
            raise FrameError(
                f"{self.peer} sent message {sequence} of generation {incarnation}.{number} where message "
                f"{self._received} of generation {'.'.join(map(str, self._generation))} was expected"
            )
        return bytes(self._view[_HEADER.size : size])

    def pass_descriptor(self, descriptor: int) -> None:
        """Give the other worker what a descriptor stands for, in turn with the messages."""
        self._enter()
        try:
            pass_descriptors(self._socket, [descriptor], self.peer)
        finally:
            self._leave()

    def receive_descriptor(self, deadline: Deadline) -> int:
        """What the other worker has passed."""
        self._enter()
        try:
            return receive_descriptors(self._socket, 1, self.peer, deadline)[0]
        finally:
            self._leave()

    def close(self) -> None:
        """End every wait on both ends. Any thread may call it, any number of times."""
        with self._lock:
            self._closed = True
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._release_if_unused()

    def _use(self, attempt: Callable[[Any], int], content: bytes | bytearray, events: int, deadline: Deadline) -> int:
        """Attempt to send or receive again and again, waiting in between, until it works."""
        self._enter()
        try:
            while True:
                try:
                    return attempt(content)
                except BlockingIOError:
                    if wait_for(self._socket, events, deadline) < 0:
                        raise self._lost("nothing was heard from it until the deadline") from None
        except OSError as error:
            raise self._lost(error.strerror or str(error)) from error
        finally:
            self._leave()


def _too_little(size: int, why: str) -> OutOfMemory:
    return OutOfMemory(
        f"there is not enough memory for the {size:,} bytes of gradients that the workers of this host share ({why}); "
        "run fewer `workers`, or set `links: tcp`."
    )
