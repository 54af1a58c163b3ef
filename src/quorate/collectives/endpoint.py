"""A worker's end of the connections of a generation."""

from dataclasses import dataclass

from quorate.core.generation import Generation, Member
from quorate.wire.handshake import Credentials
from quorate.wire.link import Deadline
from quorate.wire.reception import LocalListener, share_a_host
from quorate.wire.tcp import Listener


@dataclass(frozen=True)
class Listeners:
    """Where a worker waits for the others: over the network, and on its own host unless that is switched off."""

    network: Listener
    local: LocalListener | None

    @classmethod
    def bind(cls, host: str, *, shares_memory: bool, engine_host: str = "") -> "Listeners":
        """`engine_host`: the name of this host, where the engine tells hosts apart that one machine has."""
        return cls(Listener.bind(host), LocalListener(engine_host) if shares_memory else None)

    @property
    def local_address(self) -> str:
        """Empty where the worker cannot be met on its host."""
        return "" if self.local is None else self.local.address

    def close(self) -> None:
        self.network.close()
        if self.local is not None:
            self.local.close()


@dataclass(frozen=True)
class Endpoint:
    """A worker's end of the connections of a generation: who it is, where it listens, how long it waits for the others.

    `deadline` is for connecting, `lease` for every exchange afterwards. `silence`: the seconds after which a
    neighbour elsewhere whose host does not answer is lost, before either is over.
    """

    generation: Generation
    credentials: Credentials
    listeners: Listeners
    deadline: Deadline
    lease: Deadline
    silence: float | None = None

    @property
    def position(self) -> int:
        return self.generation.position(self.credentials.worker)

    @property
    def hosting(self) -> list[range]:
        return [member.lanes for member in self.generation.members]

    def shares_a_host_with(self, other: Member) -> bool:
        """Both ends ask this of the same two addresses, so they agree."""
        return share_a_host([self.generation.members[self.position].local_address, other.local_address])

    @property
    def is_on_one_host(self) -> bool:
        """Whether the generation has several members, and all of them can read the memory of one host."""
        members = self.generation.members
        return len(members) > 1 and share_a_host([member.local_address for member in members])
