"""How far a job has come (its cursor), and who takes it further: a numbered membership, its generation."""

import re
from collections.abc import Iterable
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


FIRST_SERVER = 1_000_000
"""Servers have ids from here on: one number tells every process of a job from the others."""


class Role(StrEnum):
    """What a member of a generation is there for."""

    WORKER = "worker"
    SERVER = "server"  # holds parameters and hosts no lane; only in strategies that have servers
    RETIRING = "retiring server"  # leaves: the others take over from it what it holds

    @classmethod
    def of(cls, member: int) -> "Role":
        return cls.SERVER if member >= FIRST_SERVER else cls.WORKER


def server_id(number: int) -> int:
    """How the server of that number is known among all processes."""
    return FIRST_SERVER + number


def name_of(member: int | None) -> str:
    """A worker or a server as people know it."""
    if member is None:
        return "a process"
    return f"server {member - FIRST_SERVER}" if member >= FIRST_SERVER else f"worker {member}"


def cell_of(member: int) -> str:
    """A worker or a server in a column of workers: 0, server 1."""
    return name_of(member).removeprefix("worker ")


def file_name_of(member: int) -> str:
    """What its files in a run's folder begin with: worker-0, server-1."""
    return name_of(member).replace(" ", "-")


def member_of(file_name: str) -> int | None:
    """Whose files begin with this; None for those of no worker and no server."""
    named = re.fullmatch(r"(worker|server)-(\d+)", file_name)
    return None if named is None else int(named[2]) + (FIRST_SERVER if named[1] == "server" else 0)


def names_of(members: Iterable[int], last: str = ", ") -> str:
    """Several of them in a list, the workers first; `last` comes before the last of each kind: workers 0, 1 and 2."""
    by_kind: dict[str, list[str]] = {}
    for member in sorted(members):
        kind, number = name_of(member).split()
        by_kind.setdefault(kind, []).append(number)
    return last.join(
        f"{kind}{'s' if len(numbers) > 1 else ''} {last.join(filter(None, (', '.join(numbers[:-1]), numbers[-1])))}"
        for kind, numbers in by_kind.items()
    )


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
    """An ordered list of workers, their addresses, and the lanes each hosts; behind them the servers, if there are any.

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

    @property
    def servers(self) -> tuple[Member, ...]:
        """Those who hold parameters, by their numbers; also who leaves."""
        return tuple(member for member in self.members if member.role is not Role.WORKER)

    def position(self, worker: int) -> int:
        return next(i for i, member in enumerate(self.members) if member.worker == worker)

    @property
    def cursor(self) -> Cursor:
        """Where it goes on: no completed step is done again. Where there are servers, the state is what they hold."""
        return max(member.cursor for member in self.servers or self.members)

    @property
    def donor(self) -> int:
        """Who gives its state to those who are behind, by its place on the ring."""
        return next(i for i, member in enumerate(self.members) if member.cursor == self.cursor)

    @property
    def behind(self) -> tuple[int, ...]:
        """Who must copy the donor's state first. Beside servers that have lost a step, a worker may be ahead of it."""
        return tuple(member.worker for member in self.members if member.cursor != self.cursor)

    def is_lowest_of_host(self, worker: int) -> bool:
        """Whether no member on the same host, by its address, has a lower number."""
        hosts = {member.worker: member.address.rpartition(":")[0] for member in self.members}
        return worker in hosts and all(host != hosts[worker] for other, host in hosts.items() if other < worker)
