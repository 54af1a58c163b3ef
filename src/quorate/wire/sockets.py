"""Sockets: how addresses are written (``host:port``, ``[::1]:port``), and what a forked child must not keep.

A data loader's process is a copy of its worker, descriptors included. If it outlives the worker, the copies keep the
worker's connections open, and its peers learn of its death seconds late. So children close them as they start.
"""

import os
import socket
import weakref

_sockets: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def close_in_children(sock: socket.socket) -> None:
    """Have every process that is forked from now on close its copy of a socket. The original is not disturbed."""
    _sockets.add(sock)


def _close_copies() -> None:
    for sock in list(_sockets):
        sock.close()


os.register_at_fork(after_in_child=_close_copies)


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
