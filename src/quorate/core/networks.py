"""The network that a process lives in: an address to listen at, and a network namespace if it has one of its own."""

import ctypes
import os
import socket
from dataclasses import dataclass

from quorate.core.errors import RequestError

NEEDED_RIGHTS = "it is for root, with CAP_SYS_ADMIN and CAP_NET_ADMIN"

CLONE_NEWNET = 0x40000000
_PATIENCE = 5.0


@dataclass(frozen=True)
class Network:
    """The address that a process listens at; `namespace` is the path of the network namespace that it enters first,
    empty where it stays in that of its parent. `host` names the host where the engine has hosts of its own: processes
    of two of them share no memory, even if one machine has both."""

    address: str
    namespace: str = ""
    host: str = ""


LOOPBACK = Network("127.0.0.1")
"""For processes that all run on this machine."""


def refuse_unreachable(host: str) -> None:
    """Before any process is started: without it a job would lose one coordinator after the other, and never say why."""
    try:
        with socket.create_server((host, 0)) as server, socket.create_connection(server.getsockname(), _PATIENCE):
            pass
    except OSError as error:
        raise RequestError(
            f"{host} is not reachable ({error.strerror or error}), and the processes of a job talk to each other over "
            "it. Bring the loopback interface up (ip link set lo up), or look at the firewall or the container's "
            "network; quorate doctor looks closer."
        ) from None


def enter_network(path: str) -> None:
    """Put this thread, and what it starts from now on, into a network namespace. What is open stays where it is."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, CLONE_NEWNET) != 0:
            reason = os.strerror(ctypes.get_errno())
            raise RequestError(f"the network namespace {path} cannot be entered ({reason}): {NEEDED_RIGHTS}.")
    finally:
        os.close(descriptor)
