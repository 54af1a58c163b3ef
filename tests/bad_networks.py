"""Network namespaces whose links are bad in more ways than a fault script can name."""

import socket
import time

from quorate.chaos.network_namespaces import DEVICE, HUB, NetworkNamespaces, call, inside_network, port_of
from quorate.core.errors import RequestError
from quorate.engines.local import COORDINATOR

_NOWHERE = "02:00:00:00:00:00"
"""Nobody's: what is sent to it is lost on the way, and the sender does not learn of it."""
_PROBES_EVERY = 0.02


class BadNetworks(NetworkNamespaces):
    """Single links and directions can be cut, and packets get lost."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._cut: set[int] = set()
        self._misled: set[tuple[int, int]] = set()
        self._lossy: dict[int, str] = {}

    def __enter__(self) -> "BadNetworks":
        super().__enter__()
        return self

    def cut_from_coordinator(self, place: int) -> None:
        """It and the coordinator do not reach each other; the other workers reach both."""
        self.cut_link(place, COORDINATOR)

    def cut_link(self, one: int, other: int) -> None:
        """These two do not reach each other; both reach everybody else."""
        self.cut_one_way(one, other)
        self.cut_one_way(other, one)

    def cut_one_way(self, sender: int, receiver: int) -> None:
        """What the one sends to the other does not arrive; the other way it does."""
        to, device = self._networks[receiver], HUB if sender == COORDINATOR else DEVICE
        self._in(sender, f"neighbour replace {to.address} dev {device} lladdr {_NOWHERE} nud permanent")
        self._misled.add((sender, receiver))

    def lose(self, place: int, percent: float) -> None:
        """So much of what goes to it, and of what comes from it, gets lost at random."""
        if not 0 <= percent <= 100:
            raise RequestError(f"{percent} percent of the packets cannot get lost: say 0 to 100.")
        self._find_again(place)
        port = port_of(place)
        try:
            self._traffic(COORDINATOR, f"qdisc add dev {port} root netem loss {percent}%")
            self._traffic(place, f"qdisc add dev {DEVICE} root netem loss {percent}%")
            self._lossy[place] = "root"
        except RequestError:
            # A kernel without sch_netem.
            self._traffic(COORDINATOR, f"qdisc add dev {port} clsact")
            self._lossy[place] = "clsact"
            program = _dropping(percent)
            for direction in ("ingress", "egress"):
                self._traffic(COORDINATOR, f"filter add dev {port} {direction} bpf da bytecode", program)

    def cut(self, place: int) -> None:
        super().cut(place)
        self._cut.add(place)

    def heal(self, place: int | None = None) -> None:
        """Undo every cut that this place has a part in; without a place, all of them."""
        for healed in [cut for cut in self._cut if place in (None, cut)]:
            super().heal(healed)
            self._cut.discard(healed)
        for pair in [pair for pair in self._misled if place is None or place in pair]:
            device, receiver = HUB if pair[0] == COORDINATOR else DEVICE, self._networks[pair[1]]
            self._in(pair[0], f"neighbour delete {receiver.address} dev {device}")
            self._misled.discard(pair)
        for healed in [lossy for lossy in self._lossy if place in (None, lossy)]:
            self._find_again(healed)

    def _find_again(self, place: int) -> None:
        """Lose nothing on the way to a place."""
        how = self._lossy.pop(place, None)
        if how is not None:
            self._traffic(COORDINATOR, f"qdisc delete dev {port_of(place)} {how}")
        if how == "root":
            self._traffic(place, f"qdisc delete dev {DEVICE} root")

    def reaches(self, sender: int, receiver: int, within: float = 1.0) -> bool:
        """Whether a packet of the one arrives at the other; several are tried."""
        source, target = self._networks[sender], self._networks[receiver]
        listening = inside_network(target.namespace, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        sending = inside_network(source.namespace, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
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

    def _traffic(self, place: int, command: str, *more: str) -> None:
        inside_network(self._networks[place].namespace, lambda: call("tc", [*command.split(), *more]))


def why_impossible() -> str | None:
    """Why there can be no namespaces here, with the remedy; None if there can."""
    try:
        with NetworkNamespaces(1):
            return None
    except RequestError as error:
        return error.message


def _dropping(percent: float) -> str:
    """A filter that drops that part of the packets: the kernel draws a number of 32 bits for each."""
    limit = min(int(percent / 100 * 2**32), 2**32 - 1)
    draw, compare, answer = (0x20, 0xFFFFF000 + 56), 0x35, 0x06
    passes, drops = 0, 2
    program = [(draw[0], 0, 0, draw[1]), (compare, 0, 1, limit), (answer, 0, 0, passes), (answer, 0, 0, drops)]
    return ",".join([str(len(program)), *(" ".join(map(str, line)) for line in program)])
