"""Where connections wait until they have proven themselves.

Anybody who reaches the port can knock as often as they like, from the same host too. So only those wait for as long as
they want whose first words are signed with the job's token or, where links are encrypted, who have shown a certificate
of the job. All others share a limited number of places: where these are taken, the address that has most of them loses
its oldest. A worker that is crowded out before its first words have come is turned away without a word, and comes
again; one whose words have come is never turned away for strangers. What is left to an attacker is to keep the listener
busy.
"""

import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import closing, contextmanager, suppress

from quorate.core.addresses import join_address
from quorate.core.errors import FrameError, LinkError, PeerLost
from quorate.core.generation import name_of
from quorate.core.processes import close_in_children
from quorate.wire.handshake import Credentials, Handshake, Identity, receive_introduction
from quorate.wire.link import CLOSED_HERE, LONGEST_WAIT, Deadline

MOST_VISITORS = 64
"""So many that have not shown that they hold the token: strangers must not use up the descriptors of a worker."""


class Visitor:
    """A connection in its handshake. It never waits: each call goes as far as the bytes that are there.

    With `shake_hands`, which goes on with that and says for which event to wait, it has to show a certificate of the
    job before it is heard; `certified` says whose that is.
    """

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        shake_hands: Callable[[], int] | None = None,
        certified: Callable[[], str] = lambda: "",
    ) -> None:
        sock.setblocking(False)
        close_in_children(sock)
        self.socket = sock
        self.address = address
        self.silent = True
        # Of its first words, once that is known to be made with the job's token.
        self.signature: bytes | None = None
        self.worker: int | None = None
        self._shake_hands = shake_hands
        self.certified = certified
        self._is_certified = False
        self._handshake: Handshake | None = None
        self._expect = 0
        self._received = b""

    def begin(self, handshake: Handshake) -> None:
        self._handshake = handshake
        self._expect = next(handshake).expect

    @property
    def is_stranger(self) -> bool:
        """Whether nothing says yet that it belongs to the job."""
        return self.signature is None and self.worker is None and not self._is_certified

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0]

    def advance(self) -> None:
        """Go on; once it has proven itself, `worker` says who it is. FrameError where it does not fit, OSError where
        it is gone."""
        assert self._handshake is not None
        try:
            while self._read():
                turn = self._handshake.send(self._received)
                # An empty packet would be taken for the end.
                if turn.send and self.socket.send(turn.send) < len(turn.send):
                    raise ConnectionError("it does not read what it is told")
                if turn.is_signed:
                    self.signature = self._received
                self._expect, self._received = turn.expect, b""
        except StopIteration as proven:
            self.worker = proven.value

    def _read(self) -> bool:
        """Whether all that the handshake expects has come; no byte beyond it is taken, since frames may follow."""
        if self._shake_hands is not None and not self._is_certified:
            if self._shake_hands():
                return False
            self._is_certified = True
        while len(self._received) < self._expect:
            try:
                content = self.socket.recv(self._expect - len(self._received))
            except BlockingIOError:
                return False
            if not content:
                raise ConnectionError("it went away without a word" if self.silent else "it went away")
            self.silent = False
            self._received += content
        return True


class Reception:
    """Takes in connections at a listening socket until one of them is the peer that is waited for."""

    def __init__(self, listening: socket.socket) -> None:
        listening.setblocking(False)
        close_in_children(listening)
        self._listening = listening
        self._visitors: list[Visitor] = []
        self._signatures: set[bytes] = set()
        self._lock = threading.Lock()
        self._waiting = False
        self._closed = False

    def admit(
        self,
        introduction: Callable[[Visitor], Handshake],
        name: str,
        deadline: Deadline,
        identity: Identity | None = None,
    ) -> Generator[Visitor, None, None]:
        """Every visitor that completes the handshake, until nobody asks for more. One thread waits at a time.

        `identity` is what they are shown where links are encrypted.
        """
        refusals: list[FrameError] = []
        began = time.monotonic()
        with self._wait():
            for visitor in self._visitors:
                visitor.begin(introduction(visitor))
            while True:
                remaining = deadline()
                if self._closed:
                    raise PeerLost(name, CLOSED_HERE)
                if remaining <= 0:
                    raise _nobody_came(name, time.monotonic() - began, refusals)
                ready = self._poll(min(remaining, LONGEST_WAIT))
                for visitor in [visitor for visitor in self._visitors if visitor.socket.fileno() in ready]:
                    self._advance(visitor, refusals)
                if self._listening.fileno() in ready:
                    self._take_in(introduction, identity, refusals)
                for visitor in [visitor for visitor in self._visitors if visitor.worker is not None]:
                    self._visitors.remove(visitor)
                    yield visitor

    def admit_all(
        self, credentials: Credentials, peers: Collection[int], deadline: Deadline, identity: Identity | None = None
    ) -> Generator[tuple[int, Visitor], None, None]:
        """Each of these workers, once it has connected and proven itself; with an identity, over an encrypted link."""
        awaited = set(peers)
        if not awaited:
            return
        name = name_of(min(awaited))

        def introduction(visitor: Visitor) -> Handshake:
            return receive_introduction(credentials, peers, visitor.certified)

        admitted = self.admit(introduction, name, deadline, identity)
        try:
            with closing(admitted) as visitors:
                for visitor in visitors:
                    assert visitor.worker is not None, "a visitor that is let in has said who it is"
                    awaited.discard(visitor.worker)
                    yield visitor.worker, visitor
                    if not awaited:
                        return
        except PeerLost as lost:
            if lost.peer != name:  # the deadline's own
                raise
            # The one that was named may have come meanwhile.
            raise PeerLost(name_of(min(awaited)), lost.detail) from None

    def close(self) -> None:
        """Stop listening, and turn everyone away; a wait in another thread ends with PeerLost."""
        with self._lock:
            self._closed = True
            with suppress(OSError):
                # Wakes the thread that polls it.
                self._listening.shutdown(socket.SHUT_RDWR)
            if not self._waiting:
                self._release()

    @contextmanager
    def _wait(self) -> Iterator[None]:
        with self._lock:
            self._waiting = True
        try:
            yield
        finally:
            with self._lock:
                self._waiting = False
                # Who has not spoken yet may be the peer that is waited for next.
                for visitor in [visitor for visitor in self._visitors if not visitor.silent]:
                    self._dismiss(visitor)
                if self._closed:
                    self._release()

    def _release(self) -> None:
        # Only once nobody polls: the number of a closed descriptor may soon be another file's.
        self._listening.close()
        for visitor in list(self._visitors):
            self._dismiss(visitor)

    def _poll(self, seconds: float) -> set[int]:
        poller = select.poll()
        for sock in (self._listening, *(visitor.socket for visitor in self._visitors)):
            poller.register(sock, select.POLLIN)
        return {descriptor for descriptor, _ in poller.poll(seconds * 1000)}

    def _advance(self, visitor: Visitor, refusals: list[FrameError]) -> None:
        was_stranger = visitor.is_stranger
        try:
            visitor.advance()
        except FrameError as error:
            refusals.append(error)
            self._dismiss(visitor)
        except OSError:
            self._dismiss(visitor)
        if was_stranger and visitor.signature is not None:
            if visitor.signature in self._signatures:
                visitor.signature = None  # overheard, and said again by a stranger
            else:
                self._signatures.add(visitor.signature)

    def _make_room(self, refusals: list[FrameError]) -> None:
        """Turn strangers away until there is a place for another; those who have spoken by now are heard first."""
        while len(strangers := [visitor for visitor in self._visitors if visitor.is_stranger]) >= MOST_VISITORS:
            crowd, _ = Counter(visitor.host for visitor in strangers).most_common(1)[0]
            oldest = next(visitor for visitor in strangers if visitor.host == crowd)
            if oldest.silent:
                self._advance(oldest, refusals)
            if oldest in self._visitors and oldest.is_stranger:
                self._dismiss(oldest)

    def _take_in(
        self, introduction: Callable[[Visitor], Handshake], identity: Identity | None, refusals: list[FrameError]
    ) -> None:
        try:
            sock, place = self._listening.accept()
        except OSError:
            # It went away between knocking and being let in, or the reception was closed.
            return
        self._make_room(refusals)
        # A worker of this host has no address of its own.
        address = join_address(place[0], place[1]) if isinstance(place, tuple) else "this host"
        if identity is None:
            visitor = Visitor(sock, address)
        else:
            from quorate.wire.tls import TlsSocket

            try:
                encrypted = TlsSocket.over(sock, identity, f"a caller ({address})")
            except OSError:  # it went away meanwhile
                return
            visitor = Visitor(encrypted, address, encrypted.shake_hands, encrypted.certified)
        visitor.begin(introduction(visitor))
        self._visitors.append(visitor)

    def _dismiss(self, visitor: Visitor) -> None:
        self._visitors.remove(visitor)
        visitor.socket.close()


def _nobody_came(name: str, waited: float, refusals: list[FrameError]) -> LinkError:
    if refusals:
        return FrameError(f"{name} did not connect within {waited:.1f} s; turned away was another: {refusals[-1]}")
    return PeerLost(name, f"it did not connect within {waited:.1f} s")
