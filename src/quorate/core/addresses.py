"""Places by their text alone: hosts and ports (``host:port``, ``[::1]:port``), and URLs, shown without secrets; and the
network that a process lives in."""

import os
import re
from dataclasses import dataclass

from quorate.core.errors import RequestError

# In a text: what follows the protocol of a URL.
_ADDRESS = re.compile(r"(?<=://)[^\s\"'<>]+")
_HOST = re.compile(r"(\[[^\]]*\]|[^:@]*)(:\d*)?")


def join_address(host: str, port: int) -> str:
    """One text for a host and a port; an IPv6 host is put in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """The host and the port that an address names."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    plain = host[1:-1] if bracketed else host
    if not colon or not plain or not port.isdecimal() or (":" in plain and not bracketed):
        raise ValueError(f"{address!r} is not an address: write host:port, or [host]:port for IPv6")
    return plain, int(port)


def is_url(text: str) -> bool:
    """Whether a place is a URL, and not a folder."""
    return "://" in text


def normalised(place: str) -> str:
    """A URL with its protocol in small letters, as libraries know them; anything else as it is."""
    protocol, separator, address = place.partition("://")
    return f"{protocol.lower()}{separator}{address}" if separator else place


def has_secret(place: str) -> bool:
    """Whether a place is a URL with a password or a query in it; a user alone is none."""
    if not is_url(place):
        return False
    address = place.partition("://")[2]
    user, _, host = address.partition("/")[0].rpartition("@")
    return "?" in address or ":" in user or _HOST.fullmatch(host) is None


def shown(text: str) -> str:
    """A URL, or a text with URLs, without what might be a secret in it."""
    return _ADDRESS.sub(lambda found: _harmless(found[0]), text)


def shown_place(place: str) -> str:
    """A place and nothing else, without what might be a secret in it, also if there are blanks in that."""
    protocol, separator, address = place.partition("://")
    return f"{protocol}{separator}{_harmless(address)}" if separator else place


def _harmless(address: str) -> str:
    address, query, _ = address.partition("?")
    host, slash, path = address.partition("/")
    before, at, _ = host.rpartition("@")
    if not at and _HOST.fullmatch(host) is None:
        before, at, _ = address.rpartition("@")  # some secrets have a slash in them
        if not at:
            return "…"
    kept = f"…{address[len(before) :]}" if at else f"{host}{slash}{path}"
    return f"{kept}?…" if query else kept


# --- the network that a process lives in: an address to listen at, and a network namespace if it has one of its own

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
    import socket  # like ctypes below, milliseconds that no command need wait for

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
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, CLONE_NEWNET) != 0:
            reason = os.strerror(ctypes.get_errno())
            raise RequestError(f"the network namespace {path} cannot be entered ({reason}): {NEEDED_RIGHTS}.")
    finally:
        os.close(descriptor)
