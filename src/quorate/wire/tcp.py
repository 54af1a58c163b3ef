"""Links over TCP: connect to a worker, or listen for one."""

import os
import select
import socket
import time

from quorate.core.digests import Buffer
from quorate.core.errors import FrameError, PeerLost
from quorate.wire.address import join_address, split_address
from quorate.wire.descriptors import close_in_children
from quorate.wire.frame import (
    HEADER_SIZE,
    Tag,
    check_length,
    check_limit,
    check_tag,
    decode_header,
    encode_header,
    flat_bytes,
)
from quorate.wire.handshake import Credentials, introduce, receive_introduction
from quorate.wire.link import RECEIVE_LIMIT, Deadline
from quorate.wire.reception import Reception
from quorate.wire.stream import Stream, wait_for


class TcpLink:
    """Frames over one connection whose ends have proven themselves."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._header = bytearray(HEADER_SIZE)

    @property
    def peer(self) -> str:
        """Who is at the other end, for people: ``worker 2 (127.0.0.1:4711)``."""
        return self._stream.peer

    def send(self, tag: Tag, payload: Buffer, deadline: Deadline) -> None:
        """Send one frame; it is in the kernel's hands when this returns."""
        content = flat_bytes(payload)
        self._stream.send_all([memoryview(encode_header(tag, content.nbytes)), content], deadline)

    def receive(self, tag: Tag, deadline: Deadline) -> bytearray:
        """The payload of the next frame."""
        length = self._receive_header(tag, None, deadline)
        payload = bytearray(length)
        self._stream.fill(memoryview(payload), deadline)
        return payload

    def receive_into(self, tag: Tag, buffer: Buffer, deadline: Deadline) -> None:
        """Put the payload of the next frame into `buffer`."""
        view = flat_bytes(buffer)
        self._receive_header(tag, view.nbytes, deadline)
        self._stream.fill(view, deadline)

    def close(self) -> None:
        """End every wait on both ends."""
        self._stream.close()

    def _receive_header(self, expected: Tag, expected_length: int | None, deadline: Deadline) -> int:
        self._stream.fill(memoryview(self._header), deadline, followed_by=expected_length or 0)
        try:
            tag, length = decode_header(self._header, self.peer)
            check_tag(expected, tag, self.peer)
            if expected_length is None:
                check_limit(RECEIVE_LIMIT, length, tag, self.peer)
            else:
                check_length(expected_length, length, tag, self.peer)
        except FrameError:
            self.close()
            raise
        return length


def connect(address: str, credentials: Credentials, peer: int, deadline: Deadline) -> TcpLink:
    """A link to worker `peer`, which listens at `address`. Where nobody listens, it is lost at once."""
    name = f"worker {peer} ({address})"
    stream = Stream(_open_connection(address, name, deadline), name)
    try:
        stream.carry_out(introduce(credentials, peer), deadline)
    except BaseException:
        stream.close()
        raise
    return TcpLink(stream)


class Listener:
    """A port at which a worker waits for its peers, one after the other."""

    def __init__(self, sock: socket.socket) -> None:
        self._reception = Reception(sock)
        close_in_children(sock)
        host, port = sock.getsockname()[:2]
        self.address = join_address(host, port)

    @classmethod
    def bind(cls, host: str, port: int = 0) -> "Listener":
        """Listen at a port of this host; 0 takes a free one. `address` tells which."""
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(place)
            sock.listen()
        except OSError:
            sock.close()
            raise
        return cls(sock)

    def accept(self, credentials: Credentials, peer: int, deadline: Deadline) -> TcpLink:
        """A link to worker `peer`, once it has connected and proven itself.

        Whoever else connects is turned away without disturbing the wait. When the deadline is over, a worker that
        came but did not fit is a FrameError, nobody at all a PeerLost.
        """
        name = f"worker {peer}"
        visitor = self._reception.admit(lambda: receive_introduction(credentials, {peer}), name, deadline)
        return TcpLink(Stream(visitor.socket, f"{name} ({visitor.address})"))

    def close(self) -> None:
        """Stop listening and turn everyone away; a wait for a peer ends with PeerLost."""
        self._reception.close()


def _open_connection(address: str, name: str, deadline: Deadline) -> socket.socket:
    host, port = split_address(address)
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise PeerLost(name, f"its address is not known here ({error})") from error
    reasons = []
    for family, kind, protocol, _, place in places:
        sock = socket.socket(family, kind, protocol)
        try:
            _connect_to(sock, place, name, deadline)
        except OSError as error:
            sock.close()
            reasons.append(str(error))
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise PeerLost(name, f"it cannot be reached ({'; '.join(reasons)})")


def _connect_to(sock: socket.socket, place: tuple[object, ...], name: str, deadline: Deadline) -> None:
    sock.setblocking(False)
    began = time.monotonic()
    try:
        sock.connect(place)
    except BlockingIOError:
        while not (found := wait_for(sock, select.POLLOUT, deadline)):
            pass
        if found < 0:
            raise PeerLost(name, f"no connection within {time.monotonic() - began:.1f} s") from None
        if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(code, os.strerror(code)) from None
