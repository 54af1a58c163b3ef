"""Network namespaces without names: each is there for as long as a process stands in it or a descriptor holds it."""

import ctypes
import os
import socket
import threading
from collections.abc import Callable
from typing import TypeVar

from quorate.core.errors import RequestError
from quorate.core.programs import find_program

Result = TypeVar("Result")

_PATIENCE = 5.0
_CLONE_NEWNET = 0x40000000
_OWN = "/proc/thread-self/ns/net"
_RIGHTS = "it is for root, with CAP_SYS_ADMIN and CAP_NET_ADMIN"


def refuse_without_loopback(host: str = "127.0.0.1") -> None:
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


def make_network() -> int:
    """A new network namespace; the descriptor that holds it. Nobody enters it by this."""

    def make() -> int:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_NEWNET) != 0:
            reason = os.strerror(ctypes.get_errno())
            raise RequestError(f"the kernel gives no network namespace ({reason}): {_RIGHTS}.")
        return os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)

    return _aside(make)


def can_make_networks() -> bool:
    """Whether this process can have network namespaces, and the program that joins them."""
    if find_program("ip") is None:
        return False
    try:
        os.close(make_network())
    except RequestError:
        return False
    return True


def enter_network(path: str) -> None:
    """Put this thread, and what it starts from now on, into a network namespace. What is open stays where it is."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            reason = os.strerror(ctypes.get_errno())
            raise RequestError(f"the network namespace {path} cannot be entered ({reason}): {_RIGHTS}.")
    finally:
        os.close(descriptor)


def inside_network(path: str, work: Callable[[], Result]) -> Result:
    """What `work` gives when it is done in a network namespace; the caller stays where it is."""

    def enter_and_work() -> Result:
        enter_network(path)
        return work()

    return _aside(enter_and_work)


def _aside(work: Callable[[], Result]) -> Result:
    """In a thread of its own: the namespace is the thread's, and ends to be anybody's with it."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="network", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
