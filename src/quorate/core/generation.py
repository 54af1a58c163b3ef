"""How far a job has come (its cursor), and who takes it further: a numbered membership, its generation."""

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum


class Phase(IntEnum):
    """What has been done at a step. An evaluation changes state (best metric, patience), so it is a phase too."""

    TRAINED = 0
    EVALUATED = 1


@dataclass(frozen=True, order=True)
class Cursor:
    """A point that every run of a job passes through; cursors are ordered, and the greater is the more advanced."""

    step: int = 0
    phase: Phase = Phase.TRAINED

    def trained(self) -> "Cursor":
        return Cursor(self.step + 1, Phase.TRAINED)

    def evaluated(self) -> "Cursor":
        return Cursor(self.step, Phase.EVALUATED)


@dataclass(frozen=True, order=True)
class GenerationId:
    """Which membership a message belongs to. A restarted coordinator has a higher incarnation."""

    incarnation: int
    number: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.number}"


class Role(StrEnum):
    """What a member of a generation is there for."""

    WORKER = "worker"
    SERVER = "server"  # holds parameters and hosts no lane; only in strategies that have servers


@dataclass(frozen=True)
class Member:
    """A process's place in a generation, and how far it is when the generation begins.

    `local_address` is where members on its own host find it, if they can. Only workers host lanes.
    """

    worker: int
    address: str
    lanes: range
    local_address: str = ""
    cursor: Cursor = field(default_factory=Cursor)
    role: Role = Role.WORKER


@dataclass(frozen=True)
class Generation:
    """An ordered list of workers, their addresses, and the lanes each hosts.

    Workers stand in lane order: the next on the ring is the next in the list.
    """

    id: GenerationId
    members: tuple[Member, ...]

    @property
    def lanes(self) -> int:
        return sum(len(member.lanes) for member in self.members)

    @property
    def workers(self) -> tuple[Member, ...]:
        """Those who train, in lane order."""
        return tuple(member for member in self.members if member.role is Role.WORKER)

    def position(self, worker: int) -> int:
        return next(i for i, member in enumerate(self.members) if member.worker == worker)

    @property
    def cursor(self) -> Cursor:
        """Where it goes on: no completed step is done again."""
        return max(member.cursor for member in self.members)

    @property
    def donor(self) -> int:
        """Who gives its state to those who are behind, by its place on the ring."""
        return next(i for i, member in enumerate(self.members) if member.cursor == self.cursor)

    @property
    def behind(self) -> tuple[int, ...]:
        """Who must copy the donor's state first."""
        return tuple(member.worker for member in self.members if member.cursor < self.cursor)

    def is_lowest_of_host(self, worker: int) -> bool:
        """Whether no member on the same host, by its address, has a lower number."""
        hosts = {member.worker: member.address.rpartition(":")[0] for member in self.members}
        return worker in hosts and all(host != hosts[worker] for other, host in hosts.items() if other < worker)
