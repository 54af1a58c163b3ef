"""A connection whose waits have deadlines and can be ended from any thread."""

import math
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from quorate.core.errors import PeerLost
from quorate.core.processes import close_in_children
from quorate.wire.handshake import WELCOME, Handshake
from quorate.wire.link import CLOSED_HERE, LONGEST_WAIT, Deadline

RECORD = 2**14 + 2**8 + 5
"""The most bytes of a record of TLS."""

LOW_WATER = 512 * 2**10
"""Bytes of a large frame that are worth waking up for."""


def wait_for(sock: socket.socket, events: int, deadline: Deadline) -> int:
    """The events that came, or 0 when it is time to ask the deadline again; negative when the deadline is over."""
    remaining = deadline()
    if remaining <= 0:
        return -1
    poller = select.poll()
    poller.register(sock, events)
    return next((found for _, found in poller.poll(min(remaining, LONGEST_WAIT) * 1000)), 0)


class Closable:
    """What threads use to reach a peer, and any thread may close: it is released when the last of them has left it.

    Closed under a thread that polls it, the number of a socket could belong to another file by the time it is used.
    """

    def __init__(self, peer: str, *sockets: socket.socket) -> None:
        for sock in sockets:
            sock.setblocking(False)
            close_in_children(sock)
        self.peer = peer
        self._sockets = sockets
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False

    def _enter(self) -> None:
        with self._lock:
            # A forked child finds its copies of the sockets closed.
            if self._closed or self._sockets[0].fileno() < 0:
                raise PeerLost(self.peer, CLOSED_HERE)
            self._users += 1

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._closed:
                self._release_if_unused()

    def _release_if_unused(self) -> None:
        if self._closed and not self._users:
            self._release()

    def _release(self) -> None:
        for sock in self._sockets:
            sock.close()

    def _lost(self, detail: str) -> PeerLost:
        # What a socket says of its peer once it is closed on this side is not to be believed.
        return PeerLost(self.peer, CLOSED_HERE if self._closed else detail)


class Stream(Closable):
    """Bytes to and from one peer. After any error it is closed.

    `silence`: the seconds after which a peer whose host does not answer is lost, for whoever asks. The socket may
    encrypt (`TlsSocket`).
    """

    def __init__(
        self, sock: socket.socket, peer: str, silence: float | None = None, *, is_encrypted: bool = False
    ) -> None:
        super().__init__(peer, sock)
        if sock.family != socket.AF_UNIX:
            # Frames are whole messages: a last partial packet must not wait for an acknowledgement.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self.is_encrypted = is_encrypted
        self._low_water = 1
        self._silence = None if silence is None else Silence(sock, silence)
        self._suspected: float | None = None

    def send_all(self, parts: list[memoryview], deadline: Deadline) -> None:
        with self._use():
            began = time.monotonic()
            while parts:
                try:
                    sent = self._socket.sendmsg(parts)
                except BlockingIOError:
                    found = self._wait(select.POLLOUT | select.POLLRDHUP, deadline, began)
                    # Nobody half-closes here: a peer that ends its direction is gone, and would never make room.
                    if found & select.POLLRDHUP:
                        raise self._lost("it closed the connection") from None
                else:
                    parts = _after(parts, sent)
                    began = time.monotonic()

    def fill(self, buffer: memoryview, deadline: Deadline, *, followed_by: int = 0) -> None:
        """Receive until a buffer is full. What follows it may as well be there when this returns."""
        with self._use():
            began = time.monotonic()
            filled = 0
            while filled < buffer.nbytes:
                try:
                    received = self._socket.recv_into(buffer[filled:])
                except BlockingIOError:
                    self._sleep_through(buffer.nbytes - filled + followed_by)
                    self._wait(select.POLLIN, deadline, began)
                else:
                    if not received:
                        raise self._lost(f"it closed the connection ({filled} of {buffer.nbytes} bytes came)")
                    filled += received
                    began = time.monotonic()

    def encrypt(self, shake_hands: Callable[[], int], deadline: Deadline) -> None:
        """Agree with the listener at the other end on how to encrypt; each proves by its certificate who it is.

        `shake_hands` goes on with that as far as what has come allows, and says which event to wait for, or 0.
        """
        with self._use():
            began = time.monotonic()
            while events := shake_hands():
                self._wait(events, deadline, began)
        self.fill(memoryview(bytearray(len(WELCOME))), deadline)

    def carry_out(self, handshake: Handshake, deadline: Deadline) -> None:
        """Say and hear what a handshake asks for, until both ends are proven."""
        with suppress(StopIteration):
            turn = next(handshake)
            while True:
                self.send_all([memoryview(turn.send)], deadline)
                reply = bytearray(turn.expect)
                self.fill(memoryview(reply), deadline)
                turn = handshake.send(bytes(reply))

    def check_silence(self) -> None:
        """Raise PeerLost if the peer's host has not answered for too long."""
        with self._lock:
            silent = None if self._silence is None or self._closed else self._silence.proven()
        if silent is not None:
            raise self._unheard(silent)

    def suspicion(self) -> PeerLost | None:
        """The loss that was to come, if its host has not answered for half of that time; also after `close`."""
        with self._lock:
            if self._silence is not None and not self._closed:
                self._suspected = self._silence.suspected()
        return None if self._suspected is None else self._unheard(self._suspected)

    def _unheard(self, seconds: float) -> PeerLost:
        return PeerLost(self.peer, f"its host has not acknowledged anything for {seconds:.1f} s")

    def close(self) -> None:
        """End every wait on both ends. The descriptor itself lives until the last wait has left it."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._suspected = None if self._silence is None else self._silence.suspected()
            with suppress(OSError):
                # Wakes the threads that poll it here, and ends the stream over there. The peer may have been faster.
                self._socket.shutdown(socket.SHUT_RDWR)
            self._release_if_unused()

    @contextmanager
    def _use(self) -> Iterator[None]:
        self._enter()
        try:
            yield
        except OSError as error:
            lost = self._lost(error.strerror or str(error))
            self.close()
            raise lost from error
        except BaseException:
            self.close()
            raise
        finally:
            self._leave()

    def _sleep_through(self, missing: int) -> None:
        """Wake up for a good part of what is missing, not for every packet: the lane that computes needs the core."""
        if self._socket.family == socket.AF_UNIX:
            return
        if self.is_encrypted:
            # So much of it may have been read already, as the beginning of a record.
            missing = max(1, missing - RECORD)
        low_water = min(missing, LOW_WATER)
        if low_water != self._low_water:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
            self._low_water = low_water

    def _wait(self, events: int, deadline: Deadline, began: float) -> int:
        found = wait_for(self._socket, events, deadline)
        if found < 0:
            raise self._lost(f"no frame for {time.monotonic() - began:.1f} s")
        return found


class Watch:
    """A deadline that looks after links whenever it is asked, if some time has passed.

    Who waits for one neighbour finds out about the other too: what it has sent to it may be on its way for ever.
    """

    def __init__(self, deadline: Deadline, links: Sequence[Stream], limit: float) -> None:
        self._deadline = deadline
        self._links = links
        self._pause = limit / LOOKS
        self._next_look = 0.0

    def __call__(self) -> float:
        """Seconds that may be waited until it is asked again. Raises PeerLost for a link that is silent."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + self._pause
            for link in self._links:
                link.check_silence()
        return min(self._deadline(), self._pause)

    def blame(self, error: BaseException) -> BaseException:
        """The reason why links broke: whoever notices a silent one first closes all that it has, the others follow."""
        if not isinstance(error, PeerLost):
            return error
        return next((suspect for link in self._links if (suspect := link.suspicion()) is not None), error)


def _after(parts: list[memoryview], sent: int) -> list[memoryview]:
    """What is left of parts once so many bytes of them are sent."""
    rest = []
    for part in parts:
        if sent >= part.nbytes:
            sent -= part.nbytes
        else:
            rest.append(part[sent:])
            sent = 0
    return rest


# --- whether the host at the other end still answers
#
# A worker may be busy or stopped for as long as it likes: its kernel acknowledges what comes all the same. What does
# not arrive, or whose acknowledgement does not, is lost on a path that is dead, of which nobody is told.

LOOKS = 4
"""So many times is looked within the time after which a peer counts as silent."""

SHORTEST_PROBE = 1
"""Seconds: the kernel counts the time between two probes of an idle connection in whole ones."""

FEWEST_PROBES = 2
"""One probe without an answer may just be lost."""

LONGEST_PROBE, MOST_PROBES = 32767, 127
"""What the kernel takes."""

# Of the kernel's tcp_info: probes (at 3), unacked (24), last_data_sent (44), last_data_recv (52), last_ack_recv (56),
# bytes_acked (120). Kernels only ever add to its end.
_TCP_INFO = struct.Struct("=3xB20xI16xI4xII60xQ")


@dataclass(frozen=True)
class TcpInfo:
    """What the kernel knows of a connection; times are in seconds from now back.

    `unacknowledged` counts packets, `probes` those that asked an idle or a full peer whether it is there, without an
    answer so far; `acknowledged` counts bytes.
    """

    probes: int
    unacknowledged: int
    since_sent: float
    since_data: float
    since_acknowledgement: float
    acknowledged: int

    @classmethod
    def of(cls, sock: socket.socket) -> "TcpInfo | None":
        """None where the kernel is too old to tell, or the connection is closed."""
        try:
            told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        except OSError:
            return None
        if len(told) < _TCP_INFO.size:
            return None
        probes, unacknowledged, sent, data, acknowledgement, acknowledged = _TCP_INFO.unpack(told)
        return cls(probes, unacknowledged, sent / 1000, data / 1000, acknowledgement / 1000, acknowledged)


class Silence:
    """How long the host at the other end of a connection has owed an answer.

    While nothing is sent, the kernel asks for one from time to time. It is not TCP_USER_TIMEOUT: that also ends a
    connection whose peer answers, but has had no room for more during all that time.
    """

    def __init__(self, sock: socket.socket, limit: float) -> None:
        self._limit = limit
        self._socket = sock
        # The bytes that were acknowledged when something more was seen to be on its way, and the moment.
        self._owed: tuple[int, float] | None = None
        self._suspected: float | None = None
        probe_every = int(min(max(SHORTEST_PROBE, limit / LOOKS), LONGEST_PROBE))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_every)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_every)
        # If nobody looks, the kernel ends the connection by itself, a little later.
        count = math.ceil(min(max(FEWEST_PROBES, limit / probe_every), MOST_PROBES))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, count)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def proven(self) -> float | None:
        """For how long it has not answered, once that is too long."""
        proven, self._suspected = self._look()
        return proven

    def suspected(self) -> float | None:
        """For how long it has not answered, once that is half of what is too long, now or at the look before.

        Where only one direction is dead, the last word of a peer that has noticed arrives: it is no answer.
        """
        before = self._suspected
        _, now = self._look()
        return before if now is None else now

    def _look(self) -> tuple[float | None, float | None]:
        info = TcpInfo.of(self._socket)
        if info is None:
            return None, None
        owed = self._owed_for(info, time.monotonic())
        silent = min(info.since_data, info.since_acknowledgement)

        def unanswered_for(limit: float, probes: int) -> float | None:
            return silent if silent >= limit and (owed >= limit or info.probes >= probes) else None

        return unanswered_for(self._limit, FEWEST_PROBES), unanswered_for(self._limit / 2, 1)

    def _owed_for(self, info: TcpInfo, now: float) -> float:
        """Since when the oldest byte on its way has been there, as far as was looked."""
        # A peer without room answers each attempt, but they become rare: time alone says nothing then.
        is_answered = info.since_acknowledgement <= info.since_sent
        if not info.unacknowledged or is_answered:
            self._owed = None
            return 0.0
        if self._owed is None or self._owed[0] != info.acknowledged:
            self._owed = info.acknowledged, now
        return now - self._owed[1]
