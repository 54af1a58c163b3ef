"""What a coordinator knows, and what it decides.

::

    Forming ──everybody stands ready──▶ Training ──all completed──▶ Ended
       ▲──────a loss, a newcomer───────────┘
       └────────nobody can go on, or a failure────────────────────▶ Ended
    Recalling (after another coordinator) ──everybody is back──▶ Forming, or Training as before
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quorate.coordinator.events import Action, Completed, Reading, Registered
from quorate.core.failure import Failure
from quorate.core.generation import Cursor, Generation, GenerationId, MeshShape, Pace, Role, WorkerStatus, common_cursor
from quorate.core.timing import Timing
from quorate.observe.events import RunFailed, RunFinished

Pair = tuple[int, int]
"""Two workers, the lower number first."""


@dataclass(frozen=True)
class JobSettings:
    """What a job's coordinator is told when it starts."""

    incarnation: int
    lanes: int
    workers: int
    timing: Timing
    min_workers: int = 1
    step_timeout: float | None = None
    spares: int = 0
    # How lanes are shared: "even", or "speed".
    balance: str = "even"
    # How many processes hold parameters; without any, workers do.
    servers: int = 0
    # How the workers of a sharded gang stand to each other, each in the place of its number; None for any other job.
    mesh: MeshShape | None = None
    # Whether another number of workers computes something else, and not only other last bits.
    is_fixed: bool = False

    @property
    def least_workers(self) -> int:
        """With how many a generation begins: a sharded gang is there in full, or not at all."""
        return self.min_workers if self.mesh is None else self.mesh.size

    def part(self, worker: int) -> int | None:
        """Which part of the state a worker holds; None where each holds all of it, or servers do."""
        return None if self.mesh is None else self.mesh.part(worker)


@dataclass(frozen=True)
class Handover:
    """Who is there when a coordinator takes the place of another: processes, and places for which one is on its way.

    `has_begun`: there has been a generation. `is_condemned`: its replicas differed, and none has begun since.
    """

    present: frozenset[tuple[int, int]]
    awaited: frozenset[int]
    has_begun: bool = True
    is_condemned: bool = False


@dataclass(frozen=True)
class Recollection:
    """What a coordinator before has written down: how the job has ended, if it has; how many workers it was to have, if
    that was changed; whether it has begun, and whether the replicas of its last generation differed."""

    end: RunFinished | RunFailed | None
    workers: int | None
    has_begun: bool
    is_condemned: bool = False
    servers: int | None = None


@dataclass(frozen=True)
class Measured:
    """How long a worker's own work takes it, smoothed over all its steps so far.

    For `slow_steps`, which took it `slow_s`, it has been far behind the others; `is_reported`: the user knows.
    """

    pace: Pace
    slow_steps: int = 0
    slow_s: float = 0.0
    is_reported: bool = False


@dataclass(frozen=True)
class Victim:
    """A worker that died in the task's own code: in which lane of which step, and how, in words."""

    worker: int
    step: int
    phase: str
    reading: Reading
    how: str


@dataclass(frozen=True)
class Enrolled:
    """A registered worker, when it was last heard, and its last word.

    `within`: the generation that it has not left; without one it stands at `cursor`, and waits for the next.
    `has_trained`: it has gone on from where a generation did, so what it holds is the state of the job and not just a
    beginning. `moved` is when it was last heard to have come any further.
    """

    registration: Registered
    heard: float
    cursor: Cursor
    sequence: int = 0
    status: WorkerStatus = field(default_factory=WorkerStatus)
    within: GenerationId | None = None
    has_trained: bool = False
    is_leaving: bool = False
    is_saved: bool = False
    # A server that leaves: the others take over what it holds at the beginning of a generation, and have done so.
    is_retiring: bool = False
    has_retired: bool = False
    moved: float = 0.0
    measured: Measured | None = None

    @property
    def worker(self) -> int:
        return self.registration.worker

    @property
    def process(self) -> tuple[int, int]:
        """Its id, and the process that has it."""
        return self.worker, self.registration.pid

    @property
    def is_server(self) -> bool:
        return Role.of(self.worker) is Role.SERVER

    @property
    def is_ready(self) -> bool:
        """Whether it can take part in the next generation."""
        return self.within is None


@dataclass(frozen=True)
class Suspicion:
    """A link failed: somebody may be dead, and the proof may be on its way.

    `symptoms` are what the members of the generation tell of it, in the order in which it is heard.
    """

    symptoms: tuple[Failure, ...]
    since: float


@dataclass(frozen=True)
class WeakLink:
    """Two workers whose link has failed so many `times` although both were alive, and `failed` then for the last time.

    `apart_helps` until it fails between two that are no neighbours: where everybody is linked to everybody.
    """

    pair: Pair
    times: int
    failed: float
    apart_helps: bool = True


@dataclass(frozen=True)
class Hangs:
    """Where the last worker hung, in how many generations in a row one has, and the number of the last of these."""

    step: int
    phase: str
    times: int
    generation: int


@dataclass(frozen=True)
class Unended:
    """A process that was killed and has not ended: since when, and when to tell of it next."""

    since: float
    tell_at: float


@dataclass(frozen=True)
class Members:
    """What is known of the workers, whatever the state."""

    settings: JobSettings
    ticked: float
    # How many workers take part; the rest are spares.
    wanted: int
    # How many servers do.
    wanted_servers: int = 0
    enrolled: tuple[Enrolled, ...] = ()
    # Whether there was a coordinator before: somebody may come whom that one knew.
    is_successor: bool = False
    # The first that registered: everyone else is compared with it, also when it is gone.
    reference: Registered | None = None
    # Places for which a process is on its way; and of those that were ordered, when it is to be started, and whether
    # from the newest checkpoint.
    awaited: frozenset[int] = frozenset()
    refills: Mapping[int, tuple[float, bool]] = field(default_factory=dict)
    # Processes that count as lost and have not been reaped; and those that have: a late word of theirs is nobody's.
    expelled: frozenset[tuple[int, int]] = frozenset()
    reaped: frozenset[tuple[int, int]] = frozenset()
    # Processes that were let go and have not been reaped.
    dismissed: frozenset[tuple[int, int]] = frozenset()
    suspicion: Suspicion | None = None
    # Whether a loss is known that explains every link of the last generation that broke.
    is_explained: bool = False
    # Links that have failed for no such reason, and how the last generation stood on its ring.
    links: tuple[WeakLink, ...] = ()
    ring: tuple[int, ...] = ()
    # Its servers, each of which is linked to everybody.
    at_service: tuple[int, ...] = ()
    stop: str | None = None
    # The last generation's number, where it went on, and how often nothing has come of one since the job last advanced.
    generations: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    # When that generation began.
    formed: float = 0.0
    # The highest cursor that a generation has begun from: losing everybody does not make it lower.
    furthest: Cursor = field(default_factory=Cursor)
    # Places for which a process was ordered after the last one that may have held the state was lost: it brings the
    # newest checkpoint, or the supervisor's word that there is none. Nobody else may begin from what it has built.
    founders: frozenset[int] = frozenset()
    deaths: int = 0
    futile: int = 0
    futile_since: float = 0.0
    # Newcomers that died while a generation was at work: they slow down the filling of their places, and nothing else.
    stillborn: int = 0
    # How often replicas have differed since the job last advanced, and whether they did in the last generation.
    diverged: int = 0
    is_condemned: bool = False
    # Two workers have computed a lane to other bits, and one of them was replaced: the other needs a second one. It is
    # the cursor of the next generation, or the beginning until there is one.
    disputed: Cursor | None = None
    # Why a worker could not apply a step: all apply the same, so its replica differs if another could.
    accused: Failure | None = None
    # Who died one after the other in the task's own code, all at the same step.
    victims: tuple[Victim, ...] = ()
    # By phase, the longest that anybody has been in it without coming any further.
    took: Mapping[str, float] = field(default_factory=dict)
    # Since when nothing moved that was last reported to stand still.
    reported_stall: float | None = None
    hangs: Hangs | None = None
    # Why a process stops, told by itself: it is lost when it is gone.
    last_words: Mapping[tuple[int, int], str] = field(default_factory=dict)
    # By place, how many processes in a row have given up without a completed step: each for a reason of its own, such
    # as too little memory, so that the others go on and no number of `deaths` slows the filling of the place down.
    given_up: Mapping[int, int] = field(default_factory=dict)
    # Those of the expelled that have been seen to be killed and not to end.
    unended: Mapping[tuple[int, int], Unended] = field(default_factory=dict)

    def find(self, worker: int | None, pid: int | None = None) -> Enrolled | None:
        """The worker of that id, if it is registered; with a pid, if it is that process."""
        return next(
            (
                known
                for known in self.enrolled
                if known.worker == worker and (pid is None or known.registration.pid == pid)
            ),
            None,
        )

    def with_newcomer(self, newcomer: "Enrolled") -> "Members":
        """One that has registered: nobody else is awaited in its place, nor ordered for it."""
        worker, registration = newcomer.worker, newcomer.registration
        return replace(
            self,
            enrolled=(*self.enrolled, newcomer),
            reference=self.reference or registration,
            awaited=self.awaited - {worker},
            refills={place: order for place, order in self.refills.items() if place != worker},
        )

    def having(self, changed: Enrolled) -> "Members":
        """With this in place of what was known of the same worker."""
        enrolled = tuple(changed if known.worker == changed.worker else known for known in self.enrolled)
        return replace(self, enrolled=enrolled)

    def is_gone(self, worker: int | None, pid: int) -> bool:
        """Whether that process counts as lost or was let go: what it says late is nobody's word."""
        return (worker, pid) in self.expelled | self.reaped | self.dismissed

    @property
    def keepers(self) -> tuple["Enrolled", ...]:
        """Those among whom the state of the job is: its servers, or its workers where there are none."""
        return tuple(known for known in self.enrolled if known.is_server) if self.settings.servers else self.enrolled

    @property
    def has_state(self) -> bool:
        """Whether anybody holds the state of the job."""
        return self.is_held_by(self.keepers)

    def is_held_by(self, some: Iterable["Enrolled"]) -> bool:
        """Whether these hold the state of the job: each part of it, in a sharded gang, and all parts at one cursor. As
        long as one of them is in a generation, its cursor is not known, and may be that of the others."""
        trained = [known for known in some if known.has_trained]
        if self.settings.mesh is None:
            return bool(trained)
        if len({self.settings.part(known.worker) for known in trained}) < self.settings.mesh.parts:
            return False
        if not all(known.is_ready for known in trained):
            return True
        return common_cursor((self.settings.part(known.worker), known.cursor) for known in trained) is not None


@dataclass(frozen=True)
class Forming:
    """Waiting until everybody who is to take part stands ready."""

    members: Members
    since: float


@dataclass(frozen=True)
class Training:
    """A generation is at work; those who are done wait for the others.

    `is_called`: it has been asked to end at the next step boundary, to let somebody in again who was left out, or to
    share the lanes anew.
    """

    members: Members
    generation: Generation
    completed: tuple[Completed, ...] = ()
    is_called: bool = False


@dataclass(frozen=True)
class Recalling:
    """A coordinator before this one has died; those who are `missing` have not come back yet.

    `newest` is the highest generation that anybody was in.
    """

    members: Members
    since: float
    missing: frozenset[tuple[int, int]]
    newest: Generation | None = None


@dataclass(frozen=True)
class Ended:
    """The job is over, for good: with a failure, or with a result."""

    failure: Failure | None
    result: Mapping[str, Any] = field(default_factory=dict)
    # By worker, the number of the last heartbeat that was heard: their last events may still be on the way.
    heard: Mapping[int, int] = field(default_factory=dict)


Active = Recalling | Forming | Training


State = Active | Ended


@dataclass(frozen=True)
class Decision:
    """The state that follows, what to do about it, and why in words."""

    state: State
    actions: tuple[Action, ...]
    reason: str
