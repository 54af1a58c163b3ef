"""Links over TCP: connect to a worker, or listen for one."""

import os
import select
import socket
import time
from collections.abc import Collection, Generator, Sequence
from contextlib import closing
from typing import Any

from quorate.core.addresses import join_address, split_address
from quorate.core.digests import Buffer
from quorate.core.errors import FrameError, PeerLost
from quorate.core.generation import name_of
from quorate.wire.handshake import Credentials, introduce
from quorate.wire.link import (
    HEADER_SIZE,
    Deadline,
    Tag,
    check_frame,
    check_payload,
    checksum_of,
    decode_header,
    encode_header,
    flat_bytes,
)
from quorate.wire.reception import Reception
from quorate.wire.stream import Stream, Watch, wait_for

Place = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[Any, ...]]

SHORTEST_CALL = 1.5
"""Seconds. The kernel calls a host once more after one: a single packet that is lost says nothing."""


class TcpLink(Stream):
    """Frames over one connection whose ends prove themselves first.

    `peer` is who is at the other end, for people: ``worker 2 (127.0.0.1:4711)``.
    """

    def __init__(
        self, sock: socket.socket, peer: str, silence: float | None = None, *, is_encrypted: bool = False
    ) -> None:
        super().__init__(sock, peer, silence, is_encrypted=is_encrypted)
        self._header = bytearray(HEADER_SIZE)

    def send(self, tag: Tag, payload: Buffer, deadline: Deadline) -> None:
        content = flat_bytes(payload)
        header = encode_header(tag, content.nbytes, checksum_of(content))
        self.send_all([memoryview(header), content], deadline)

    def receive(self, tag: Tag, deadline: Deadline) -> bytearray:
        length, checksum = self._receive_header(tag, None, deadline)
        payload = bytearray(length)
        self._receive_payload(tag, memoryview(payload), checksum, deadline)
        return payload

    def receive_into(self, tag: Tag, buffer: Buffer, deadline: Deadline) -> None:
        view = flat_bytes(buffer)
        _, checksum = self._receive_header(tag, view.nbytes, deadline)
        self._receive_payload(tag, view, checksum, deadline)

    def _receive_header(self, expected: Tag, expected_length: int | None, deadline: Deadline) -> tuple[int, int]:
        self.fill(memoryview(self._header), deadline, followed_by=expected_length or 0)
        try:
            tag, length, checksum = decode_header(self._header, self.peer)
            check_frame(expected, expected_length, tag, length, self.peer)
        except FrameError:
            self.close()
            raise
        return length, checksum

    def _receive_payload(self, tag: Tag, payload: memoryview, checksum: int, deadline: Deadline) -> None:
        self.fill(payload, deadline)
        try:
            check_payload(checksum, payload, tag, self.peer)
        except FrameError:
            self.close()
            raise


def connect(
    address: str, credentials: Credentials, peer: int, deadline: Deadline, silence: float | None = None
) -> TcpLink:
    """A link to worker `peer`, which listens at `address`. Where nobody listens, it is lost at once.

    `silence`: seconds after which it is lost if its host does not answer, whatever the deadline says.
    """
    name = f"{name_of(peer)} ({address})"
    identity, shake_hands = credentials.identity, None
    sock = _open_connection(address, name, deadline, silence)
    if identity is not None:
        from quorate.wire.tls import TlsSocket

        encrypted = TlsSocket.over(sock, identity, name, calls=peer)
        sock, shake_hands = encrypted, encrypted.shake_hands
    link = TcpLink(sock, name, silence, is_encrypted=identity is not None)
    try:
        watch = deadline if silence is None else Watch(deadline, [link], silence)
        if shake_hands is not None:
            link.encrypt(shake_hands, watch)
        link.carry_out(introduce(credentials, peer), watch)
    except BaseException:
        link.close()
        raise
    return link


class Listener(Reception):
    """A port at which a worker waits for its peers, one after the other."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        host, port = sock.getsockname()[:2]
        self.address = join_address(host, port)

    @classmethod
    def bind(cls, host: str, port: int = 0) -> "Listener":
        """Listen at a port of this host; 0 takes a free one. `address` tells which."""
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return cls(socket.create_server((host, port), family=family))

    def accept(self, credentials: Credentials, peer: int, deadline: Deadline, silence: float | None = None) -> TcpLink:
        """A link to worker `peer`, once it has connected and proven itself.

        Whoever else connects is turned away without disturbing the wait. When the deadline is over, a worker that
        came but did not fit is a FrameError, nobody at all a PeerLost.
        """
        with closing(self.accept_all(credentials, {peer}, deadline, silence)) as links:
            _, link = next(links)
        return link

    def accept_all(
        self, credentials: Credentials, peers: Collection[int], deadline: Deadline, silence: float | None = None
    ) -> Generator[tuple[int, TcpLink], None, None]:
        """Links to all of these workers, in the order in which they come. Whoever awaits several has to await them at
        once: one that comes while another is awaited is turned away for good."""
        with closing(self.admit_all(credentials, peers, deadline, credentials.identity)) as visitors:
            for peer, visitor in visitors:
                name = f"{name_of(peer)} ({visitor.address})"
                yield peer, TcpLink(visitor.socket, name, silence, is_encrypted=credentials.identity is not None)


def _places(address: str, name: str) -> Sequence[Place]:
    host, port = split_address(address)
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise PeerLost(name, f"its address is not known here ({error})") from error


def _open_connection(address: str, name: str, deadline: Deadline, silence: float | None) -> socket.socket:
    reasons = []
    for family, kind, protocol, _, place in _places(address, name):
        sock = socket.socket(family, kind, protocol)
        try:
            _connect_to(sock, place, name, deadline, silence)
        except OSError as error:
            sock.close()
            reasons.append(str(error))
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise PeerLost(name, f"it cannot be reached ({'; '.join(reasons)})")


def _connect_to(
    sock: socket.socket, place: tuple[object, ...], name: str, deadline: Deadline, silence: float | None
) -> None:
    sock.setblocking(False)
    began = time.monotonic()
    try:
        sock.connect(place)
    except BlockingIOError:
        while not (found := wait_for(sock, select.POLLOUT, deadline)):
            waited = time.monotonic() - began
            if silence is not None and waited >= max(silence, SHORTEST_CALL):
                raise OSError(f"its host has not answered for {waited:.1f} s") from None
        if found < 0:
            raise PeerLost(name, f"no connection within {time.monotonic() - began:.1f} s") from None
        if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(code, os.strerror(code)) from None
