"""How workers of one host find each other: a socket that has a name, but no file that could be left behind."""

import contextlib
import os
import secrets
import select
import socket
import time
from collections.abc import Collection, Generator, Sequence
from pathlib import Path

from quorate.core.errors import FrameError, PeerLost
from quorate.core.generation import name_of
from quorate.wire.handshake import Credentials, introduce
from quorate.wire.link import Deadline
from quorate.wire.reception import Reception
from quorate.wire.stream import Stream, wait_for

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
