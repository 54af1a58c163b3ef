"""A connection between two workers of one host, for short messages that must arrive in microseconds."""

import select
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

from quorate.core.errors import FrameError, PeerLost
from quorate.core.generation import GenerationId
from quorate.wire.link import CLOSED_HERE, LONGEST_WAIT, Deadline
from quorate.wire.sockets import close_in_children

LONGEST_MESSAGE = 32 * 1024
_HEADER = struct.Struct("<qqQ")


class Doorbell:
    """Messages of at most `LONGEST_MESSAGE` bytes, numbered, both ways.

    A wait lets go of its core at once. Looking again and again would be a little faster where every worker has a core
    of its own, and several times slower where they share one: it keeps the others from what they are waited for.
    """

    def __init__(self, sock: socket.socket, peer: str, generation: GenerationId) -> None:
        sock.setblocking(False)
        close_in_children(sock)
        self.peer = peer
        self._socket = sock
        self._generation = (generation.incarnation, generation.number)
        self._sent = 0
        self._received = 0
        self._buffer = bytearray(_HEADER.size + LONGEST_MESSAGE)
        self._view = memoryview(self._buffer)
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False

    def ring(self, message: bytes, deadline: Deadline) -> None:
        """Send a message; it is on its way when this returns."""
        self._sent += 1
        packet = _HEADER.pack(*self._generation, self._sent) + message
        self._use(lambda: self._socket.send(packet), select.POLLOUT, deadline)

    def answer(self, deadline: Deadline) -> bytes:
        """The peer's next message."""
        size = self._use(lambda: self._socket.recv_into(self._buffer), select.POLLIN, deadline)
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

    def close(self) -> None:
        """End every wait on both ends. Any thread may call it, any number of times."""
        with self._lock:
            self._closed = True
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._release_if_unused()

    def _use(self, attempt: Callable[[], int], events: int, deadline: Deadline) -> int:
        """Attempt something again and again, waiting in between, until it works."""
        with self._lock:
            if self._closed:
                raise self._lost(CLOSED_HERE)
            self._users += 1
        try:
            while True:
                try:
                    return attempt()
                except BlockingIOError:
                    self._wait(events, deadline)
        except OSError as error:
            raise self._lost(error.strerror or str(error)) from error
        finally:
            with self._lock:
                self._users -= 1
                self._release_if_unused()

    def _release_if_unused(self) -> None:
        # Closed under a thread that polls it, the number could belong to another file by the time it is used.
        if self._closed and not self._users:
            self._socket.close()

    def _wait(self, events: int, deadline: Deadline) -> None:
        remaining = deadline()
        if remaining <= 0:
            raise self._lost("nothing was heard from it until the deadline")
        poller = select.poll()
        poller.register(self._socket, events)
        poller.poll(min(remaining, LONGEST_WAIT) * 1000)

    def _lost(self, detail: str) -> PeerLost:
        return PeerLost(self.peer, CLOSED_HERE if self._closed else detail)
