"""Links through memory that two workers of one host share: connect to a worker, or wait for one.

Each direction has slots of its own in the memory and a doorbell of its own beside it. A sender fills a slot and rings;
the receiver empties it, and rings back when several are free again. So a byte is copied in once and out once, and a
frame of any length flows through a few slots while both ends work on it.
"""

import os
import socket
import time
from collections.abc import Collection, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

import numpy

from quorate.core.digests import Buffer
from quorate.core.errors import FrameError, PeerLost
from quorate.core.generation import GenerationId, name_of
from quorate.core.processes import close_in_children
from quorate.wire.handshake import Credentials
from quorate.wire.link import (
    CLOSED_HERE,
    HEADER_SIZE,
    Deadline,
    Tag,
    check_frame,
    decode_header,
    encode_header,
    flat_bytes,
)
from quorate.wire.reception import LocalListener, connect_local, pass_descriptors, receive_descriptors
from quorate.wire.shared_memory import Doorbell, Segment
from quorate.wire.stream import Closable

SLOT = 2**19
"""Bytes in a slot: enough that ringing costs little beside copying, few enough that both ends soon have work."""

SLOTS = 8
"""In each direction. Doorbells never overflow: no more messages than this are on their way at any time."""

_LITTLE = 2**12
"""Bytes that are copied faster than other threads are let run."""

_GOES_ON = b"+"
"""What is rung for a slot that continues a frame. For its first slot it is the frame's header."""

_FREE = b"-"
"""What is rung back each time that half of the slots are free again: one at a time would be half of all the ringing."""


class SharedLink(Closable):
    """Frames through shared memory, between workers that have proven themselves.

    `sending` and `receiving` are the connections of the two directions; `side` says whose slots come first in memory.
    """

    def __init__(
        self,
        peer: str,
        generation: GenerationId,
        memory: Segment,
        sending: socket.socket,
        receiving: socket.socket,
        side: int,
    ) -> None:
        super().__init__(peer, sending, receiving)
        self._memory = memory.shared()
        self._doorbells = Doorbell(sending, peer, generation), Doorbell(receiving, peer, generation)
        # Where the slots of each direction begin; they are gone through in turn, so counting them says which is next.
        self._places = _room() * side, _room() * (1 - side)
        self._filled = self._emptied = 0
        self._unused = SLOTS

    def send(self, tag: Tag, payload: Buffer, deadline: Deadline) -> None:
        content = flat_bytes(payload)
        with self._use():
            message = encode_header(tag, content.nbytes)
            for start in _starts(content.nbytes):
                self._fill_slot(message, content[start : start + SLOT], self._patient(deadline))
                message = _GOES_ON

    def receive(self, tag: Tag, deadline: Deadline) -> bytearray:
        with self._use():
            payload = bytearray(self._receive_header(tag, None, deadline))
            self._receive_payload(memoryview(payload), deadline)
            return payload

    def receive_into(self, tag: Tag, buffer: Buffer, deadline: Deadline) -> None:
        view = flat_bytes(buffer)
        with self._use():
            self._receive_header(tag, view.nbytes, deadline)
            self._receive_payload(view, deadline)

    def close(self) -> None:
        """End every wait on both ends. The memory itself lives until the last thread has left it."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for sock, doorbell in zip(self._sockets, self._doorbells, strict=True):
                    # Closed over messages that nobody has read, a connection would be reset, and the peer would not
                    # have the last frames that were sent to it.
                    with suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)  # nothing comes after this
                        while sock.recv(1):
                            pass
                    doorbell.close()
            self._release_if_unused()

    def _receive_header(self, expected: Tag, expected_length: int | None, deadline: Deadline) -> int:
        header = self._doorbells[1].answer(self._patient(deadline))
        if len(header) != HEADER_SIZE:
            raise FrameError(f"{self.peer} sent {len(header)} bytes where a frame begins with {HEADER_SIZE}")
        tag, length, _ = decode_header(header, self.peer)
        check_frame(expected, expected_length, tag, length, self.peer)
        return length

    def _receive_payload(self, view: memoryview, deadline: Deadline) -> None:
        for start in _starts(view.nbytes):
            if start:
                self._expect(_GOES_ON, self._doorbells[1].answer(self._patient(deadline)))
            self._empty_slot(view[start : start + SLOT], self._patient(deadline))

    def _fill_slot(self, message: bytes, piece: memoryview, deadline: Deadline) -> None:
        if not self._unused:
            self._expect(_FREE, self._doorbells[0].answer(deadline))
            self._unused = SLOTS // 2
        start = self._places[0] + self._filled * SLOT
        _copy(piece, memoryview(self._memory)[start : start + piece.nbytes])
        self._filled, self._unused = (self._filled + 1) % SLOTS, self._unused - 1
        self._doorbells[0].ring(message, deadline)

    def _empty_slot(self, piece: memoryview, deadline: Deadline) -> None:
        start = self._places[1] + self._emptied * SLOT
        _copy(memoryview(self._memory)[start : start + piece.nbytes], piece)
        self._emptied = (self._emptied + 1) % SLOTS
        if self._emptied % (SLOTS // 2) == 0:
            # A peer that has closed the link needs no slots any more, and its last frames are still to be had.
            with suppress(PeerLost):
                self._doorbells[1].ring(_FREE, deadline)

    def _expect(self, expected: bytes, message: bytes) -> None:
        if message != expected:
            raise FrameError(
                f"{self.peer} sent {message[:HEADER_SIZE]!r} where {expected!r} was expected: it has lost its place"
            )

    def _patient(self, deadline: Deadline) -> Deadline:
        """A deadline that says, when it is over, for how long nothing came."""
        began = time.monotonic()

        def remaining() -> float:
            seconds = deadline()
            if seconds <= 0:
                raise PeerLost(self.peer, f"no frame for {time.monotonic() - began:.1f} s")
            return seconds

        return remaining

    @contextmanager
    def _use(self) -> Iterator[None]:
        self._enter()
        try:
            yield
        except PeerLost as error:
            # What a connection says of its peer once it is closed on this side is not to be believed.
            lost = PeerLost(self.peer, CLOSED_HERE) if self._closed else error
            self.close()
            raise lost from error.__cause__
        except BaseException:
            self.close()
            raise
        finally:
            self._leave()

    def _release(self) -> None:
        # The doorbells close the sockets. A thread that was interrupted while it copied may still show the memory in
        # its traceback.
        with suppress(BufferError):
            self._memory.close()


def connect_shared(address: str, credentials: Credentials, peer: int, deadline: Deadline) -> SharedLink:
    """A link to worker `peer` of this host. Where nobody listens, it is lost at once."""
    name = f"{name_of(peer)} (this host)"
    with ExitStack() as passed, ExitStack() as on_failure:
        memory = Segment.create(2 * _room())
        passed.callback(memory.close)
        forth = connect_local(address, credentials, peer, deadline)
        on_failure.callback(forth.close)
        back, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        on_failure.callback(back.close)
        # Were a copy of the other end kept anywhere on this side, the death of the peer would not end the connection.
        passed.callback(theirs.close)
        close_in_children(theirs)
        pass_descriptors(forth, [memory.descriptor, theirs.fileno()], name)
        link = SharedLink(name, credentials.generation, memory, sending=forth, receiving=back, side=0)
        on_failure.pop_all()
    return link


def accept_all_shared(
    listener: LocalListener, credentials: Credentials, peers: Collection[int], deadline: Deadline
) -> Generator[tuple[int, SharedLink], None, None]:
    """Links to all of these workers of this host, in the order in which they come."""
    with closing(listener.accept(credentials, peers, deadline)) as visitors:
        for peer, forth in visitors:
            yield peer, _adopt(forth, credentials, peer, deadline)


def _adopt(forth: socket.socket, credentials: Credentials, peer: int, deadline: Deadline) -> SharedLink:
    """The link of which a worker that has connected passes the memory and the other connection."""
    name = f"{name_of(peer)} (this host)"
    with ExitStack() as received, ExitStack() as on_failure:
        on_failure.callback(forth.close)
        shared, connection = receive_descriptors(forth, 2, name, deadline)
        try:
            back = socket.socket(fileno=connection)
        except OSError as error:
            os.close(connection)
            os.close(shared)
            raise FrameError(f"{name} passed something that is not a connection") from error
        on_failure.callback(back.close)
        memory = Segment.adopt(shared, 2 * _room())
        received.callback(memory.close)
        link = SharedLink(name, credentials.generation, memory, sending=back, receiving=forth, side=1)
        on_failure.pop_all()
    return link


def _room() -> int:
    """Bytes of one direction."""
    return SLOT * SLOTS


def _starts(length: int) -> range:
    """Where the pieces of a payload begin. An empty one has a piece too, an empty one: a frame takes a slot."""
    return range(0, max(length, 1), SLOT)


def _copy(source: memoryview, target: memoryview) -> None:
    if source.nbytes > _LITTLE:
        # NumPy lets the other threads run meanwhile: one may be sending while another receives.
        numpy.copyto(numpy.frombuffer(target, numpy.uint8), numpy.frombuffer(source, numpy.uint8))
    elif source.nbytes:
        target[:] = source
