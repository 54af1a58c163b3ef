"""How far a job has come (its cursor), who takes it further (a numbered membership, its generation), and what a worker
tells of itself."""

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


def common_cursor(held: Iterable[tuple[int | None, Cursor]]) -> Cursor | None:
    """The furthest at which every part of the state is held by somebody; None if there is none. What is held is told by
    part and cursor; where the state is not cut into parts, each holds all of it."""
    by_part: dict[int | None, set[Cursor]] = {}
    for part, cursor in held:
        by_part.setdefault(part, set()).add(cursor)
    return max(set.intersection(*by_part.values()), default=None) if by_part else None


@dataclass(frozen=True)
class MeshShape:
    """`replicate` × `shard` × `tensor` workers, by their numbers: the last dimension counts first, so that those who
    exchange most are neighbours."""

    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        return self.replicate * self.shard * self.tensor

    @property
    def groups(self) -> int:
        """How many read data of their own: whoever stands in one tensor dimension reads the same."""
        return self.replicate * self.shard

    @property
    def parts(self) -> int:
        """Into how many parts the state is cut; every replica holds all of them."""
        return self.shard * self.tensor

    def part(self, worker: int) -> int:
        """Which part of the state a worker holds."""
        return worker % self.parts

    def lanes_of(self, worker: int, lanes: int) -> range:
        """The lanes that a worker computes."""
        each, group = lanes // self.groups, worker // self.tensor
        return range(group * each, (group + 1) * each)

    def told_by(self, worker: int, lanes: int) -> range:
        """The lanes that it speaks for: the first of those who compute them does, the others for none."""
        hosted = self.lanes_of(worker, lanes)
        return hosted if worker % self.tensor == 0 else range(hosted.stop, hosted.stop)

    def __str__(self) -> str:
        return " × ".join(
            f"{name} {size}"
            for name, size in (("replicate", self.replicate), ("shard", self.shard), ("tensor", self.tensor))
            if size > 1 or (name == "shard" and self.size == 1)
        )


@dataclass(frozen=True)
class Member:
    """A process's place in a generation, and how far it is when the generation begins.

    `local_address` is where members on its own host find it, if they can. Only workers host lanes; in a sharded gang,
    where `part` says what of the state it holds, those lanes are told by one of the workers that compute them.
    """

    worker: int
    address: str
    lanes: range
    local_address: str = ""
    cursor: Cursor = field(default_factory=Cursor)
    role: Role = Role.WORKER
    part: int | None = None


@dataclass(frozen=True)
class Generation:
    """An ordered list of workers, their addresses, and the lanes each hosts; behind them the servers, if there are any.

    Workers stand in lane order: the next on the ring is the next in the list. In a sharded gang, worker n is the n-th.
    `restored`: a sharded gang has lost a part of its state, and all take up the checkpoint of that cursor; where that
    is the beginning there is none, and all begin anew.
    """

    id: GenerationId
    members: tuple[Member, ...]
    restored: Cursor | None = None

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
        if self.restored is not None:
            return self.restored
        common = common_cursor((member.part, member.cursor) for member in self.servers or self.members)
        if common is None:
            raise ValueError(f"generation {self.id} has no cursor at which each part of the state is held")
        return common

    @property
    def donor(self) -> int:
        """Who gives its state to those who are behind, by its place on the ring. Of a part, one of its holders does."""
        return next(i for i, member in enumerate(self.members) if member.cursor == self.cursor)

    def holders(self, part: int | None) -> tuple[int, ...]:
        """Who holds a part of the state where the generation goes on, by their places: whoever is behind copies from
        one of them, and where there is none takes up the checkpoint of the cursor."""
        cursor = self.cursor
        return tuple(i for i, one in enumerate(self.members) if one.part == part and one.cursor == cursor)

    @property
    def behind(self) -> tuple[int, ...]:
        """Who must take up another state first. Beside servers that have lost a step, or where a part of the state is
        lost, a worker may be ahead of it."""
        cursor = self.cursor
        return tuple(member.worker for member in self.members if member.cursor != cursor)

    @property
    def mesh(self) -> MeshShape | None:
        """How the workers of a sharded gang stand to each other; None in any other."""
        parts = {member.part for member in self.members}
        if None in parts:
            return None
        groups = max(1, sum(bool(member.lanes) for member in self.members))
        tensor = len(self.members) // groups
        return MeshShape(len(self.members) // len(parts), len(parts) // tensor, tensor)

    def is_lowest_of_host(self, worker: int) -> bool:
        """Whether no member on the same host, by its address, has a lower number."""
        hosts = {member.worker: member.address.rpartition(":")[0] for member in self.members}
        return worker in hosts and all(host != hosts[worker] for other, host in hosts.items() if other < worker)


# --- what a worker tells of itself: where it stands, what it does, how long that takes it, and how its process ended


@dataclass(frozen=True)
class WorkerStatus:
    """How far a worker is, as far as is known, and what it is doing.

    `moves` is another number whenever it has come any further; `waits_for`: who or what it waits for in its phase.
    """

    step: int | None = None
    phase: str = ""
    moves: int = 0
    waits_for: str = ""


@dataclass(frozen=True)
class Position:
    """Its latest generation, if it has been in one. If it `has_left` that, it stands at `cursor` until the next.

    `has_trained`: what it holds is the state of the job, and not just a beginning.
    """

    generation: Generation | None = None
    cursor: Cursor = field(default_factory=Cursor)
    has_left: bool = True
    has_trained: bool = False


@dataclass(frozen=True)
class Pace:
    """Mean seconds over so many steps: `data_s` and `compute_s` for each lane that it hosts, `apply_s` for a step.

    `lanes` is how many it hosted at the last of these steps.
    """

    steps: int
    lanes: int
    data_s: float
    compute_s: float
    apply_s: float

    @property
    def lane_s(self) -> float:
        return self.data_s + self.compute_s

    @property
    def work_s(self) -> float:
        """Seconds that a step takes of its own time."""
        return self.lanes * self.lane_s + self.apply_s


# --- what it is doing: in its heartbeats, on its status page, in the autopsy

DATA, COMPUTE, EXCHANGE, APPLY = "data", "compute", "exchange", "apply"
"""The phases of a step."""
EVALUATION, CHECKPOINT, TURN = "evaluation", "checkpoint", "turn"
"""What may follow a step; the last is the user's code between two steps, in a training loop of one's own."""
JOIN, COPY, REGROUP = "join", "copy", "regroup"
"""Between two generations."""
WAITING = "wait"
"""In no generation yet."""

OTHERS, DISK = "the other workers", "the disk"
"""What a worker may wait for inside a phase."""

# --- how its process ends of itself, where that is no failure of the job

ENDED_WITH_THE_JOB = 3
"""The job was ended, by whatever failed elsewhere."""
LEFT = 4
"""It was asked to leave, and was let go."""
GAVE_UP = 5
"""It cannot go on, and has told why; another in its place can."""
DIVERGED = 6
"""The replicas of its generation differ, so that what it holds must not be used any more."""

# --- what an engine says in the place of an exit code: numbers that no process can end with, whatever its task calls

ENDED_WITH_ITS_GROUP = 257
"""Another process of a group that is started and ended as one was lost, and so this one was ended."""
LOST_WITH_ITS_HOST = 258
"""Its host is lost, or ended by whoever runs it: nobody has seen how the process ended."""
ENDED_FOR_A_STOP = 259
"""The launcher has killed it: it, or what it had started, was stopped (SIGSTOP) for too long."""
