"""Workers as on hosts of their own: each in a network namespace whose cable can be cut.

::

    the launcher ─── the hub: the coordinator, and a bridge ─┬─ namespace 0: worker 0
                                                             ├─ namespace 1: worker 1
                                                             └─ …

The namespaces have no names: the launcher holds each by a descriptor. However it ends, killed or not, the kernel
removes them once their processes are gone and the last words of these are sent or given up (seconds, where the way is
cut), and the cables with them, the launcher's too: all have an end in one.
"""

import contextlib
import ctypes
import ipaddress
import os
import random
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from quorate.core.addresses import CLONE_NEWNET, NEEDED_RIGHTS, Network, enter_network
from quorate.core.errors import RequestError
from quorate.core.processes import find_program
from quorate.engines.local import COORDINATOR

Result = TypeVar("Result")

RANGE = ipaddress.IPv4Network("198.18.0.0/15")
"""For measuring networks, by RFC 2544: it is routed nowhere. Each job has 254 addresses of it."""

MOST_NAMESPACES = 200

HUB, DEVICE, _LAUNCHER = "hub", "outside", "launcher"
"""Names of network devices: the bridge, each worker's end of its cable, and the launcher's."""
_HUB_HOST, _LAUNCHER_HOST, _FIRST_HOST = 1, 2, 10
_RETRIES_FILE, _ORPHAN_RETRIES = Path("/proc/sys/net/ipv4/tcp_orphan_retries"), 3
_OWN = "/proc/thread-self/ns/net"


class NetworkNamespaces:
    """So many namespaces around one hub, from `__enter__` to `__exit__`.

    ::

        with NetworkNamespaces(3) as namespaces:
            ...LocalEngine(..., namespaces.network_of)...
            namespaces.cut(2)
            namespaces.heal(2)

    `cable` is the name of the launcher's, the only thing of all this that is seen in the launcher's network.
    What is cut is silent: nobody is told, packets just do not arrive. A cut of what is cut already changes nothing.
    """

    def __init__(self, count: int) -> None:
        if not 1 <= count <= MOST_NAMESPACES:
            raise RequestError(f"there can be 1 to {MOST_NAMESPACES} namespaces, not {count}: lower `workers`.")
        self._count = count
        self._descriptors: list[int] = []
        self.cable = ""
        self._networks: dict[int, Network] = {}

    def __enter__(self) -> "NetworkNamespaces":
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all of it; what is still in use is gone when its processes are."""
        if self.cable:
            # The kernel would do it, a little later.
            subprocess.run([_find("ip"), "link", "delete", self.cable], capture_output=True, check=False)
            self.cable = ""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def network_of(self, place: int) -> Network:
        """A worker's network, or the hub's for COORDINATOR."""
        return self._networks[place]

    def cut(self, place: int) -> None:
        """Nobody reaches it, and it reaches nobody: its cable is pulled out."""
        self._in(COORDINATOR, f"link set dev {port_of(place)} down")

    def heal(self, place: int) -> None:
        self._in(COORDINATOR, f"link set dev {port_of(place)} up")

    def _make(self) -> None:
        hub = self._new_network()
        network = self._take_range(hub)
        hosts = list(network.hosts())
        prefix = network.prefixlen
        coordinator = str(hosts[_HUB_HOST - 1])
        self._networks[COORDINATOR] = Network(coordinator, hub)
        self._in(
            COORDINATOR,
            "link set lo up",
            f"link add name {HUB} type bridge",
            f"address add {coordinator}/{prefix} dev {HUB}",
            f"link set {HUB} up",
            f"link set {_LAUNCHER} master {HUB} up",
        )
        for place in range(self._count):
            address = str(hosts[_FIRST_HOST + place - 1])
            self._networks[place] = Network(address, self._new_network())
            self._in(
                place,
                "link set lo up",
                f"link add name {DEVICE} type veth peer name {port_of(place)} netns {hub}",
                f"address add {address}/{prefix} dev {DEVICE}",
                f"link set {DEVICE} up",
            )
        self._in(COORDINATOR, *(f"link set {port_of(place)} master {HUB} up" for place in range(self._count)))
        # The launcher's end has room for the two of them only: it has no way to the namespaces.
        own = hosts[_LAUNCHER_HOST - 1]
        _ip(f"address add {own}/30 dev {self.cable}", f"link set {self.cable} up")

    def _take_range(self, hub: str) -> ipaddress.IPv4Network:
        """Addresses that nobody else has here, by a cable from here to the hub: its name is taken by one alone."""
        networks = list(RANGE.subnets(new_prefix=24))
        for number in random.SystemRandom().sample(range(len(networks)), len(networks)):
            name = f"quorate-{number}"
            try:
                _ip(f"link add name {name} type veth peer name {_LAUNCHER} netns {hub}")
            except RequestError:
                if name not in (known for _, known in socket.if_nameindex()):
                    raise
                continue  # another launcher has it
            self.cable = name
            return networks[number]
        raise RequestError(f"all of {RANGE} is in use here: namespaces need 256 addresses of it.")

    def _new_network(self) -> str:
        """A new one, in which what a dead process has left to send is given up soon.

        It keeps the namespace, for minutes where the way is cut.
        """
        self._descriptors.append(make_network())
        network = f"/proc/{os.getpid()}/fd/{self._descriptors[-1]}"
        with contextlib.suppress(OSError):  # a container may not let it be written; then it takes the minutes
            inside_network(network, lambda: _RETRIES_FILE.write_text(str(_ORPHAN_RETRIES)))
        return network

    def _in(self, place: int, *commands: str) -> None:
        inside_network(self._networks[place].namespace, lambda: _ip(*commands))


def make_network() -> int:
    """A new network namespace; the descriptor that holds it. Nobody enters it by this."""

    def make() -> int:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNET) != 0:
            reason = os.strerror(ctypes.get_errno())
            raise RequestError(f"the kernel gives no network namespace ({reason}): {NEEDED_RIGHTS}.")
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


def inside_network(path: str, work: Callable[[], Result]) -> Result:
    """What `work` gives when it is done in a network namespace; the caller stays where it is."""

    def enter_and_work() -> Result:
        enter_network(path)
        return work()

    return _aside(enter_and_work)


def _aside(work: Callable[[], Result]) -> Result:
    """In a thread of its own: the namespace is the thread's, and ends to be anybody's with it."""
    with ThreadPoolExecutor(1, "network") as thread:
        return thread.submit(work).result()


def port_of(place: int) -> str:
    """The network device at the hub's end of a worker's cable."""
    return f"namespace-{place}"


def _ip(*commands: str) -> None:
    call("ip", ["-batch", "-"], "\n".join(commands))


def call(program: str, arguments: list[str], stdin: str = "") -> str:
    """What a program of iproute2 prints when it is given these arguments, and this on its standard input."""
    done = subprocess.run([_find(program), *arguments], input=stdin, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = " ".join(done.stderr.split()) or f"it ended with code {done.returncode}"
        remedy = "namespaces need root and, of the kernel, veth and bridge: modprobe -a veth bridge"
        command = " ".join([program, *arguments]) + (f": {stdin}" if stdin else "")
        raise RequestError(f"`{command}` failed: {reason} ({remedy}).")
    return done.stdout


def _find(program: str) -> str:
    found = find_program(program)
    if found is None:
        raise RequestError(f"`{program}` is not installed, which namespaces are made with: install iproute2.")
    return found
