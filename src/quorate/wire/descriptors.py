"""Sockets that a forked child must not keep.

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
