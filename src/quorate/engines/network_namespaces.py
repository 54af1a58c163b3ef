"""Workers as on hosts of their own: each on an namespace, a network namespace, whose cables can be cut.

::

    the launcher ─── the hub: the coordinator, and a bridge ─┬─ namespace 0: worker 0
                                                             ├─ namespace 1: worker 1
                                                             └─ …

The namespaces have no names: the launcher holds each by a descriptor. However it ends, killed or not, the kernel
removes them once their processes are gone and the last words of these are sent or given up (seconds, where the way is
cut), and the cables with them, the launcher's too: all have an end in one.
"""

import contextlib
import ipaddress
import json
import os
import random
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from quorate.core.errors import RequestError
from quorate.core.fault import Act, Fault
from quorate.core.networks import inside_network, make_network
from quorate.core.programs import find_program

COORDINATOR = -1
"""The coordinator's place, where that of a worker is asked for as well."""

RANGE = ipaddress.IPv4Network("198.18.0.0/15")
"""For measuring networks, by RFC 2544: it is routed nowhere. Each archipelago has 254 addresses of it."""

MOST_NAMESPACES = 200

_HUB, _SHORE, _LAUNCHER = "hub", "shore", "launcher"
_HUB_HOST, _LAUNCHER_HOST, _FIRST_HOST = 1, 2, 10
_NOWHERE = "02:00:00:00:00:00"
"""Nobody's: what is sent to it is lost on the way, and the sender does not learn of it."""

_PROBES_EVERY = 0.02
_ORPHAN_RETRIES = 3


@dataclass(frozen=True)
class NetworkNamespace:
    """A network namespace: where it is found, the address of whoever lives there, and the device that has it."""

    network: str
    address: str
    device: str


@contextlib.contextmanager
def namespaces_for(faults: Sequence[Fault], places: int) -> Iterator["NetworkNamespaces | None"]:
    """For a job in which somebody is cut off, one for each place that it may come to have; else none."""
    if not any(fault.act is Act.CUT for fault in faults):
        yield None
        return
    with NetworkNamespaces(places + sum(fault.act is Act.ADD for fault in faults)) as namespaces:
        yield namespaces


class NetworkNamespaces:
    """So many namespaces around one hub, from `__enter__` to `__exit__`.

    ::

        with NetworkNamespaces(3) as namespaces:
            ...Launch(..., namespaces=namespaces)...
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
        self._namespaces: dict[int, NetworkNamespace] = {}
        self._cut: set[int] = set()
        self._misled: set[tuple[int, int]] = set()
        self._lossy: dict[int, str] = {}

    def __enter__(self) -> "NetworkNamespaces":
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all of it; what is still in use is gone when its processes are."""
        if self.cable:
            # The kernel would do it, a little later.
            subprocess.run([_find("ip"), "link", "delete", self.cable], capture_output=True, check=False)
            self.cable = ""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int) -> NetworkNamespace:
        """A worker's namespace, or the hub for COORDINATOR."""
        return self._namespaces[place]

    # --- cutting and healing

    def cut(self, place: int) -> None:
        """Nobody reaches it, and it reaches nobody: its cable is pulled out."""
        self._in(COORDINATOR, f"link set dev {_port(place)} down")
        self._cut.add(place)

    def cut_from_coordinator(self, place: int) -> None:
        """It and the coordinator do not reach each other; the other workers reach both."""
        self.cut_link(place, COORDINATOR)

    def cut_link(self, one: int, other: int) -> None:
        """These two do not reach each other; both reach everybody else."""
        self.cut_one_way(one, other)
        self.cut_one_way(other, one)

    def cut_one_way(self, sender: int, receiver: int) -> None:
        """What the one sends to the other does not arrive; the other way it does."""
        to, device = self._namespaces[receiver], self._namespaces[sender].device
        self._in(sender, f"neighbour replace {to.address} dev {device} lladdr {_NOWHERE} nud permanent")
        self._misled.add((sender, receiver))

    def lose(self, place: int, percent: float) -> None:
        """So much of what goes to it, and of what comes from it, gets lost at random."""
        if not 0 <= percent <= 100:
            raise RequestError(f"{percent} percent of the packets cannot get lost: say 0 to 100.")
        self._find_again(place)
        port = _port(place)
        try:
            self._traffic(COORDINATOR, f"qdisc add dev {port} root netem loss {percent}%")
            self._traffic(place, f"qdisc add dev {_SHORE} root netem loss {percent}%")
            self._lossy[place] = "root"
        except RequestError:
            # A kernel without sch_netem.
            self._traffic(COORDINATOR, f"qdisc add dev {port} clsact")
            self._lossy[place] = "clsact"
            program = _dropping(percent)
            for direction in ("ingress", "egress"):
                self._traffic(COORDINATOR, f"filter add dev {port} {direction} bpf da bytecode", program)

    def heal(self, place: int | None = None) -> None:
        """Undo every cut that this place has a part in; without a place, all of them."""
        for healed in [cut for cut in self._cut if place in (None, cut)]:
            self._in(COORDINATOR, f"link set dev {_port(healed)} up")
            self._cut.discard(healed)
        for pair in [pair for pair in self._misled if place is None or place in pair]:
            sender, receiver = self._namespaces[pair[0]], self._namespaces[pair[1]]
            self._in(pair[0], f"neighbour delete {receiver.address} dev {sender.device}")
            self._misled.discard(pair)
        for healed in [lossy for lossy in self._lossy if place in (None, lossy)]:
            self._find_again(healed)

    def _find_again(self, place: int) -> None:
        """Lose nothing on the way to a place."""
        how = self._lossy.pop(place, None)
        if how is not None:
            self._traffic(COORDINATOR, f"qdisc delete dev {_port(place)} {how}")
        if how == "root":
            self._traffic(place, f"qdisc delete dev {_SHORE} root")

    def reaches(self, sender: int, receiver: int, within: float = 1.0) -> bool:
        """Whether a packet of the one arrives at the other; several are tried."""
        source, target = self._namespaces[sender], self._namespaces[receiver]
        listening = inside_network(target.network, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        sending = inside_network(source.network, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        with listening, sending:
            listening.bind((target.address, 0))
            listening.settimeout(_PROBES_EVERY)
            over = time.monotonic() + within
            while True:
                try:
                    sending.sendto(b"?", listening.getsockname())
                    return listening.recv(1) == b"?"
                except OSError:  # nothing came, or the kernel knows already that it cannot be sent
                    if time.monotonic() >= over:
                        return False

    # --- making

    def _make(self) -> None:
        for program in ("ip", "tc"):
            _find(program)
        hub = self._new_network()
        network = self._take_range(hub)
        hosts = list(network.hosts())
        prefix = network.prefixlen
        coordinator = str(hosts[_HUB_HOST - 1])
        self._namespaces[COORDINATOR] = NetworkNamespace(hub, coordinator, _HUB)
        self._in(
            COORDINATOR,
            "link set lo up",
            f"link add name {_HUB} type bridge",
            f"address add {coordinator}/{prefix} dev {_HUB}",
            f"link set {_HUB} up",
            f"link set {_LAUNCHER} master {_HUB} up",
        )
        for place in range(self._count):
            address = str(hosts[_FIRST_HOST + place - 1])
            namespace = self._namespaces[place] = NetworkNamespace(self._new_network(), address, _SHORE)
            self._in(
                place,
                "link set lo up",
                f"link add name {_SHORE} type veth peer name {_port(place)} netns {hub}",
                f"address add {namespace.address}/{prefix} dev {_SHORE}",
                f"link set {_SHORE} up",
            )
        self._in(COORDINATOR, *(f"link set {_port(place)} master {_HUB} up" for place in range(self._count)))
        # The launcher's end has room for the two of them only: it has no way to the namespaces.
        own = hosts[_LAUNCHER_HOST - 1]
        _ip(f"address add {own}/30 dev {self.cable}", f"link set {self.cable} up")

    def _take_range(self, hub: str) -> ipaddress.IPv4Network:
        """Addresses that nobody else has here, by a cable from here to the hub: its name is taken by one alone."""
        networks = list(RANGE.subnets(new_prefix=24))
        used = _routes()
        free = [number for number, network in enumerate(networks) if not any(map(network.overlaps, used))]
        random.SystemRandom().shuffle(free)
        refusal = RequestError(f"all of {RANGE} is in use here: namespaces need 256 addresses of it.")
        for number in free:
            name = f"quorate-{number}"
            try:
                _ip(f"link add name {name} type veth peer name {_LAUNCHER} netns {hub}")
            except RequestError as error:
                refusal = error
                if name not in (known for _, known in socket.if_nameindex()):
                    break
                continue  # another launcher was faster
            self.cable = name
            return networks[number]
        raise refusal

    def _new_network(self) -> str:
        self._descriptors.append(make_network())
        network = f"/proc/{os.getpid()}/fd/{self._descriptors[-1]}"
        inside_network(network, _forget_the_dead_soon)
        return network

    def _in(self, place: int, *commands: str) -> None:
        inside_network(self._namespaces[place].network, lambda: _ip(*commands))

    def _traffic(self, place: int, command: str, *more: str) -> None:
        inside_network(self._namespaces[place].network, lambda: _call("tc", [*command.split(), *more]))


def why_impossible() -> str | None:
    """Why there can be no namespaces here, with the remedy; None if there can."""
    try:
        with NetworkNamespaces(1):
            return None
    except RequestError as error:
        return error.message


def _forget_the_dead_soon() -> None:
    """What a dead process has left to send keeps its namespace, for minutes where the way is cut: try less often."""
    with contextlib.suppress(OSError):  # a container may not let it be written; then it takes the minutes
        Path("/proc/sys/net/ipv4/tcp_orphan_retries").write_text(str(_ORPHAN_RETRIES))


def _port(place: int) -> str:
    """The hub's end of a cable."""
    return f"namespace-{place}"


def _routes() -> list[ipaddress.IPv4Network]:
    """Where this namespace has a way to, but for the one to everywhere."""
    told = json.loads(_call("ip", ["-json", "-4", "route", "show", "table", "all"]) or "[]")
    found = (route["dst"] for route in told if route["dst"] != "default")
    return [ipaddress.IPv4Network(target, strict=False) for target in found]


def _dropping(percent: float) -> str:
    """A filter that drops that part of the packets: the kernel draws a number of 32 bits for each."""
    limit = min(int(percent / 100 * 2**32), 2**32 - 1)
    draw, compare, answer = (0x20, 0xFFFFF000 + 56), 0x35, 0x06
    passes, drops = 0, 2
    program = [(draw[0], 0, 0, draw[1]), (compare, 0, 1, limit), (answer, 0, 0, passes), (answer, 0, 0, drops)]
    return ",".join([str(len(program)), *(" ".join(map(str, line)) for line in program)])


def _ip(*commands: str) -> None:
    _call("ip", ["-batch", "-"], "\n".join(commands))


def _call(program: str, arguments: list[str], told: str = "") -> str:
    done = subprocess.run([_find(program), *arguments], input=told, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = " ".join(done.stderr.split()) or f"it ended with code {done.returncode}"
        remedy = "namespaces need root and, of the kernel, veth and bridge: modprobe -a veth bridge"
        command = " ".join([program, *arguments]) + (f": {told}" if told else "")
        raise RequestError(f"`{command}` failed: {reason} ({remedy}).")
    return done.stdout


def _find(program: str) -> str:
    found = find_program(program)
    if found is None:
        raise RequestError(f"`{program}` is not installed, which namespaces are made with: install iproute2.")
    return found
