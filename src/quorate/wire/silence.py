"""Whether the host at the other end of a connection still answers.

A worker may be busy or stopped for as long as it likes: its kernel acknowledges what comes all the same. What does not
arrive, or whose acknowledgement does not, is lost on a path that is dead, of which nobody is told.
"""

import math
import socket
import struct
import time
from dataclasses import dataclass

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
