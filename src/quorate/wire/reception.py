"""Where connections wait until they have proven themselves.

Anybody who reaches the port can knock. Only so many wait at a time: one more takes the place of the one that has waited
longest, which for a worker is a matter of milliseconds.
"""

import contextlib
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from quorate.core.addresses import join_address
from quorate.core.errors import FrameError, LinkError, PeerLost
from quorate.core.generation import name_of
from quorate.core.processes import close_in_children
from quorate.wire.handshake import Credentials, Handshake, Identity, introduce, receive_introduction
from quorate.wire.link import CLOSED_HERE, LONGEST_WAIT, Deadline
from quorate.wire.stream import Stream, wait_for

MOST_VISITORS = 256
"""So many that are in their handshake: strangers must not use up the descriptors of a worker."""


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
        self.worker: int | None = None
        self.certified = certified
        self._shake_hands = shake_hands
        self._handshake: Handshake | None = None
        self._expect = 0
        self._received = b""

    def begin(self, handshake: Handshake) -> None:
        self._handshake = handshake
        self._expect = next(handshake).expect

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
                self._expect, self._received = turn.expect, b""
        except StopIteration as proven:
            self.worker = proven.value

    def _read(self) -> bool:
        """Whether all that the handshake expects has come; no byte beyond it is taken, since frames may follow."""
        if self._shake_hands is not None and self._shake_hands():
            return False
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
        self._lock = threading.Lock()
        self._waiting = False
        self._closed = False

    def admit_all(
        self, credentials: Credentials, peers: Collection[int], deadline: Deadline, identity: Identity | None = None
    ) -> Generator[tuple[int, Visitor], None, None]:
        """Each of these workers, once it has connected and proven itself; with an identity, over an encrypted link. One
        thread waits at a time."""
        awaited = set(peers)
        if not awaited:
            return
        refusals: list[FrameError] = []
        began = time.monotonic()

        def begin(visitor: Visitor) -> None:
            visitor.begin(receive_introduction(credentials, peers, visitor.certified))

        with self._wait():
            for visitor in self._visitors:
                begin(visitor)
            while awaited:
                remaining, name = deadline(), name_of(min(awaited))
                if self._closed:
                    raise PeerLost(name, CLOSED_HERE)
                if remaining <= 0:
                    raise _nobody_came(name, time.monotonic() - began, refusals)
                ready = self._poll(min(remaining, LONGEST_WAIT))
                self._hear(ready, refusals)
                if self._listening.fileno() in ready and (came := self._take_in(identity)) is not None:
                    begin(came)
                for visitor in list(self._visitors):
                    if visitor.worker is not None:
                        self._visitors.remove(visitor)
                        awaited.discard(visitor.worker)
                        yield visitor.worker, visitor

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

    def _hear(self, ready: set[int], refusals: list[FrameError]) -> None:
        for visitor in [visitor for visitor in self._visitors if visitor.socket.fileno() in ready]:
            try:
                visitor.advance()
            except FrameError as error:
                refusals.append(error)
                self._dismiss(visitor)
            except OSError:
                self._dismiss(visitor)

    def _take_in(self, identity: Identity | None) -> Visitor | None:
        try:
            sock, place = self._listening.accept()
            # A worker of this host has no address of its own.
            address = join_address(place[0], place[1]) if isinstance(place, tuple) else "this host"
            if identity is None:
                visitor = Visitor(sock, address)
            else:
                from quorate.wire.tls import TlsSocket

                encrypted = TlsSocket.over(sock, identity, f"a caller ({address})")
                visitor = Visitor(encrypted, address, encrypted.shake_hands, encrypted.certified)
        except OSError:
            # It went away between knocking and being let in, or the reception was closed.
            return None
        if len(self._visitors) >= MOST_VISITORS:
            self._dismiss(self._visitors[0])
        self._visitors.append(visitor)
        return visitor

    def _dismiss(self, visitor: Visitor) -> None:
        self._visitors.remove(visitor)
        visitor.socket.close()


def _nobody_came(name: str, waited: float, refusals: list[FrameError]) -> LinkError:
    if refusals:
        return FrameError(f"{name} did not connect within {waited:.1f} s; turned away was another: {refusals[-1]}")
    return PeerLost(name, f"it did not connect within {waited:.1f} s")


# --- how workers of one host find each other: by a socket that has a name, but no file that could be left behind

MOST_DESCRIPTORS = 4


class LocalListener(Reception):
    """Where a worker waits for the other workers of its host. `address` is empty where that is impossible.

    `host` tells hosts apart that one machine has.
    """

    def __init__(self, host: str = "") -> None:
        name = f"quorate-{secrets.token_hex(16)}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.bind(f"\0{name}")
        sock.listen()
        super().__init__(sock)
        identity = "-".join(filter(None, (host_identity(), host)))
        self.address = f"{identity}/{name}" if host_identity() else ""

    def accept(
        self, credentials: Credentials, peers: Collection[int], deadline: Deadline
    ) -> Generator[tuple[int, socket.socket], None, None]:
        """All of these workers, each once it has connected and proven itself."""
        with contextlib.closing(self.admit_all(credentials, peers, deadline)) as visitors:
            for peer, visitor in visitors:
                yield peer, visitor.socket


def connect_local(address: str, credentials: Credentials, peer: int, deadline: Deadline) -> socket.socket:
    """A connection to worker `peer` of this host. Where nobody listens, it is lost at once."""
    name = f"{name_of(peer)} (this host)"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(f"\0{address.rpartition('/')[2]}")
        Stream(sock, name).carry_out(introduce(credentials, peer), deadline)
    except OSError as error:
        sock.close()
        raise PeerLost(name, f"it cannot be reached ({error.strerror or error})") from error
    except BaseException:
        sock.close()
        raise
    return sock


def host_identity() -> str:
    """Equal for processes that run under one kernel and can reach each other's sockets and memory.

    By the boot and the namespaces, never by the host's name: containers of different machines share names.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("ipc", "net")]  # noqa: PTH116 (not a file)
    except OSError:
        return ""
    return "-".join([boot, *map(str, spaces)])


def share_a_host(addresses: Sequence[str]) -> bool:
    """Whether all of these are addresses of one host."""
    hosts = {address.rpartition("/")[0] for address in addresses}
    return len(hosts) == 1 and "" not in hosts


def pass_descriptors(sock: socket.socket, descriptors: Sequence[int], peer: str) -> None:
    """Give another process what these descriptors stand for."""
    try:
        socket.send_fds(sock, [b"m"], list(descriptors))
    except OSError as error:
        raise PeerLost(peer, error.strerror or str(error)) from error


def receive_descriptors(sock: socket.socket, count: int, peer: str, deadline: Deadline) -> list[int]:
    """What another process has passed: so many."""
    began = time.monotonic()
    while True:
        try:
            # Inherited by a program that is started here, a connection would outlive its worker.
            message, found, _, _ = socket.recv_fds(sock, 1, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            if wait_for(sock, select.POLLIN, deadline) < 0:
                raise PeerLost(peer, f"it passed no memory within {time.monotonic() - began:.1f} s") from None
            continue
        except OSError as error:
            raise PeerLost(peer, error.strerror or str(error)) from error
        if not message:
            raise PeerLost(peer, "it closed the connection")
        if len(found) != count:
            for descriptor in found:
                os.close(descriptor)
            raise FrameError(f"{peer} passed {len(found)} descriptors where {count} were expected")
        return found
