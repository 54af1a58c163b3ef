"""Where connections wait until they have proven themselves."""

import select
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress

from quorate.core.errors import FrameError, LinkError, PeerLost
from quorate.wire.address import join_address
from quorate.wire.descriptors import close_in_children
from quorate.wire.handshake import Handshake
from quorate.wire.link import CLOSED_HERE, LONGEST_WAIT, Deadline

MOST_VISITORS = 64
"""Beyond it the oldest visitor is turned away, so that strangers cannot use up the descriptors of a worker."""


class Visitor:
    """A connection in its handshake. It never waits: each call goes as far as the bytes that are there."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        sock.setblocking(False)
        close_in_children(sock)
        self.socket = sock
        self.address = address
        self.silent = True
        self.worker: int | None = None
        self._handshake: Handshake | None = None
        self._expect = 0
        self._received = b""

    def begin(self, handshake: Handshake) -> None:
        """Start on a handshake, whose first turn is the visitor's."""
        self._handshake = handshake
        self._expect = next(handshake).expect

    def advance(self) -> bool:
        """Whether it has proven itself; FrameError where it does not fit, OSError where it is gone."""
        assert self._handshake is not None
        try:
            while self._read():
                turn = self._handshake.send(self._received)
                self._reply(turn.send)
                self._expect, self._received = turn.expect, b""
        except StopIteration as proven:
            self.worker = proven.value
            return True
        return False

    def _read(self) -> bool:
        """Whether all that the handshake expects has come; no byte beyond it is taken, since frames may follow."""
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

    def _reply(self, message: bytes) -> None:
        if self.socket.send(message) < len(message):
            raise ConnectionError("it does not read what it is told")


class Reception:
    """Takes in connections at a listening socket until one of them is the peer that is waited for."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._visitors: list[Visitor] = []
        self._lock = threading.Lock()
        self._waiting = False
        self._closed = False

    def admit(self, introduction: Callable[[], Handshake], name: str, deadline: Deadline) -> Visitor:
        """The first visitor that completes the handshake. One thread waits at a time."""
        with closing(self.admit_each(introduction, name, deadline)) as visitors:
            return next(visitors)

    def admit_each(
        self, introduction: Callable[[], Handshake], name: str, deadline: Deadline
    ) -> Generator[Visitor, None, None]:
        """Every visitor that completes the handshake, until nobody asks for more."""
        refusals: list[FrameError] = []
        began = time.monotonic()
        with self._wait():
            for visitor in self._visitors:
                visitor.begin(introduction())
            while True:
                remaining = deadline()
                if self._closed:
                    raise PeerLost(name, CLOSED_HERE)
                if remaining <= 0:
                    raise _nobody_came(name, time.monotonic() - began, refusals)
                ready = self._poll(min(remaining, LONGEST_WAIT))
                for visitor in [visitor for visitor in self._visitors if visitor.socket.fileno() in ready]:
                    if self._advance(visitor, refusals):
                        self._visitors.remove(visitor)
                        yield visitor
                if self._listening.fileno() in ready:
                    self._take_in(introduction)

    def close(self) -> None:
        """Stop listening; a wait in another thread ends with PeerLost."""
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

    def _advance(self, visitor: Visitor, refusals: list[FrameError]) -> bool:
        try:
            return visitor.advance()
        except FrameError as error:
            refusals.append(error)
        except OSError:
            pass
        self._dismiss(visitor)
        return False

    def _take_in(self, introduction: Callable[[], Handshake]) -> None:
        try:
            sock, place = self._listening.accept()
        except OSError:
            # It went away between knocking and being let in, or the reception was closed.
            return
        if len(self._visitors) == MOST_VISITORS:
            self._dismiss(self._visitors[0])
        # A worker of this host has no address of its own.
        visitor = Visitor(sock, join_address(place[0], place[1]) if isinstance(place, tuple) else "this host")
        visitor.begin(introduction())
        self._visitors.append(visitor)

    def _dismiss(self, visitor: Visitor) -> None:
        self._visitors.remove(visitor)
        visitor.socket.close()


def _nobody_came(name: str, waited: float, refusals: list[FrameError]) -> LinkError:
    if refusals:
        return FrameError(f"{name} did not connect within {waited:.1f} s; turned away was another: {refusals[-1]}")
    return PeerLost(name, f"it did not connect within {waited:.1f} s")
