"""The values of the coordinator: what happens to it, what it knows, and what it wants done.

::

    events    Registered HeartbeatReceived StateReported FailureReported ExitReported Completed StopRequested
              ResizeRequested LauncherGone Tick
    states    Forming ──everybody stands ready──▶ Training ──all completed──▶ Ended
                 ▲──────a loss, a newcomer───────────┘
                 └────────nobody can go on, or a failure────────────────────▶ Ended
              Recalling (after another coordinator) ──everybody is back──▶ Forming, or Training as before
    actions   Welcome Refuse Recall GrantLease RecordEvents RecordLoss RecordResize Warn Inform DeclareGeneration
              Regroup Dismiss Refill Expel RelayStop EndJob
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quorate.coordinator.ring_order import Pair
from quorate.core.cursor import Cursor
from quorate.core.failure import Failure
from quorate.core.generation import Generation, GenerationId
from quorate.core.pace import Pace
from quorate.core.position import Position
from quorate.core.timing import Timing


@dataclass(frozen=True)
class Terms:
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

    @property
    def registration_limit(self) -> float:
        """Seconds from the start within which every worker registers. Building a big model takes its time."""
        return max(60.0, 10 * self.timing.failure_timeout)


@dataclass(frozen=True)
class Roster:
    """Who is there when a coordinator takes the place of another: processes, and places for which one is on its way.

    `has_begun`: there has been a generation.
    """

    present: frozenset[tuple[int, int]]
    awaited: frozenset[int]
    has_begun: bool = True


@dataclass(frozen=True)
class Place:
    """How far a worker was last known to be, and what it was doing."""

    step: int | None = None
    phase: str = ""


@dataclass(frozen=True)
class Reading:
    """The lane that a worker was in, and the samples of an epoch that it has: `count`, of which `samples` are known."""

    lane: int
    epoch: int = 0
    samples: tuple[int, ...] = ()
    count: int = 0


@dataclass(frozen=True)
class Measured:
    """How long a worker's own work takes it, smoothed over all its steps so far.

    For `slow_steps`, which took it `slow_s`, it has been far behind the others; `is_told`: that has been reported.
    """

    pace: Pace
    slow_steps: int = 0
    slow_s: float = 0.0
    is_told: bool = False


@dataclass(frozen=True)
class Victim:
    """A worker that died in the task's own code: in which lane of which step, and how, in words."""

    worker: int
    step: int
    phase: str
    reading: Reading
    how: str


# --- events: what happens to a coordinator


@dataclass(frozen=True)
class Registered:
    """A worker asks for its place."""

    worker: int
    pid: int
    host: str
    address: str
    facts: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    cursor: Cursor = field(default_factory=Cursor)
    local_address: str = ""
    # Where it stands, if it was registered with an earlier coordinator.
    position: Position | None = None

    @property
    def process(self) -> tuple[int, str, str]:
        """What tells one process from another that asks for the same place."""
        return self.pid, self.host, self.address


@dataclass(frozen=True)
class HeartbeatReceived:
    """A worker is alive, and tells where it is and what happened meanwhile."""

    worker: int
    generation: GenerationId
    sequence: int
    place: Place
    events: tuple[str, ...] = ()
    pid: int = 0
    # It has been asked to leave, by whoever owns its machine.
    is_leaving: bool = False
    # How long its own work took since the last heartbeat, if it has completed steps.
    pace: Pace | None = None


@dataclass(frozen=True)
class StateReported:
    """A worker has left its generation. It stands at `cursor`, and takes nothing more of that generation.

    The coordinator goes on from such promises only. `symptom` is the broken link that made it leave, if it was one.
    `is_saved`: there is a checkpoint of where it stands.
    """

    worker: int
    pid: int
    generation: GenerationId
    cursor: Cursor
    symptom: Failure | None = None
    is_saved: bool = False


@dataclass(frozen=True)
class FailureReported:
    """A worker tells why it stops. The worker is None when it has not been registered."""

    worker: int | None
    failure: Failure


@dataclass(frozen=True)
class ExitReported:
    """The supervisor has reaped a process; exactly one of code and signal is known."""

    worker: int
    pid: int
    host: str
    exit_code: int | None
    signal: int | None
    place: Place
    reading: Reading | None = None


@dataclass(frozen=True)
class Completed:
    """A worker is done, in a generation; None if it does not tell in which."""

    worker: int
    digest: str
    result: Mapping[str, Any] = field(default_factory=dict)
    pid: int = 0
    generation: GenerationId | None = None


@dataclass(frozen=True)
class StopRequested:
    """Somebody wants the job to stop at the next step boundary, with a checkpoint."""

    reason: str


@dataclass(frozen=True)
class ResizeRequested:
    """Somebody wants the job to go on with another number of workers."""

    workers: int


@dataclass(frozen=True)
class LauncherGone:
    """The process that started the coordinator, and that looks after the workers, has ended."""


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


MembershipEvent = (
    Registered
    | HeartbeatReceived
    | StateReported
    | FailureReported
    | ExitReported
    | Completed
    | StopRequested
    | ResizeRequested
    | LauncherGone
    | Tick
)


# --- states: what a coordinator knows


@dataclass(frozen=True)
class Enrolled:
    """A registered worker, when it was last heard, and its last word.

    `within`: the generation that it has not left; without one it stands at `cursor`, and waits for the next.
    `has_trained`: it has gone on from where a generation did, so what it holds is the state of the job and not just a
    beginning. It `moved` on to the step that it is at then, and the `usual` step takes it so many seconds.
    """

    registration: Registered
    heard: float
    cursor: Cursor
    sequence: int = 0
    place: Place = Place()
    within: GenerationId | None = None
    has_trained: bool = False
    is_leaving: bool = False
    is_saved: bool = False
    last_words: str = ""
    moved: float = 0.0
    usual: float = 0.0
    measured: Measured | None = None

    @property
    def worker(self) -> int:
        """Its id."""
        return self.registration.worker

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

    @property
    def failure(self) -> Failure:
        """What was heard first: the rest may be its consequences."""
        return self.symptoms[0]


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
class Crew:
    """What is known of the workers, whatever the state."""

    terms: Terms
    ticked: float
    # How many take part; the rest are spares.
    wanted: int
    enrolled: tuple[Enrolled, ...] = ()
    # Whether there was a coordinator before: somebody may come whom that one knew.
    is_successor: bool = False
    # The first that registered: everyone else is compared with it, also when it is gone.
    reference: Registered | None = None
    # Places for which a process is on its way.
    awaited: frozenset[int] = frozenset()
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
    stop: str | None = None
    # The last generation's number, where it went on, and how often nothing has come of one since the job last advanced.
    generations: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    # When that generation began.
    formed: float = 0.0
    # The highest cursor that a generation has begun from: losing everybody does not make it lower.
    furthest: Cursor = field(default_factory=Cursor)
    # Of what there is a checkpoint for sure.
    saved: Cursor = field(default_factory=Cursor)
    deaths: int = 0
    futile: int = 0
    # Newcomers that died while a generation was at work: they slow down the filling of their places, and nothing else.
    stillborn: int = 0
    # Who died one after the other in the task's own code, all at the same step.
    victims: tuple[Victim, ...] = ()
    # The step that was last reported to take too long.
    slow_step: int | None = None

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

    @property
    def has_state(self) -> bool:
        """Whether anybody holds the state of the job."""
        return any(known.has_trained for known in self.enrolled)


@dataclass(frozen=True)
class Forming:
    """Waiting until everybody who is to take part stands ready."""

    crew: Crew
    since: float


@dataclass(frozen=True)
class Training:
    """A generation is at work; those who are done wait for the others.

    `is_called`: it has been asked to end at the next step boundary, to let somebody in again who was left out, or to
    share the lanes anew.
    """

    crew: Crew
    generation: Generation
    completed: tuple[Completed, ...] = ()
    is_called: bool = False


@dataclass(frozen=True)
class Recalling:
    """A coordinator before this one has died; those who are `missing` have not come back yet.

    `newest` is the highest generation that anybody was in.
    """

    crew: Crew
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


# --- actions: what a coordinator wants done


@dataclass(frozen=True)
class Welcome:
    """Tell a worker that its place is its own."""

    worker: int
    lease: float


@dataclass(frozen=True)
class Refuse:
    """Tell a worker, or somebody who is none, that it cannot have what it asks for, and why."""

    worker: int | None
    failure: Failure


@dataclass(frozen=True)
class Recall:
    """Ask a worker of an earlier coordinator to register again, and to tell where it stands."""

    worker: int


@dataclass(frozen=True)
class GrantLease:
    """Tell a worker for how long it may act, from the sending of its heartbeat."""

    worker: int
    seconds: float


@dataclass(frozen=True)
class RecordEvents:
    """Write down what a worker tells, in its order."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class DeclareGeneration:
    """Tell every worker who hosts which lanes."""

    generation: Generation


@dataclass(frozen=True)
class RecordLoss:
    """Write down that a worker was lost, and `detect` seconds after the first sign of it."""

    failure: Failure
    detect: float


@dataclass(frozen=True)
class RecordResize:
    """Write down that the job goes on with another number of workers."""

    before: int
    workers: int


@dataclass(frozen=True)
class Warn:
    """Tell the user of something that goes on as it is."""

    message: str
    step: int


@dataclass(frozen=True)
class Inform:
    """Tell the user of something that is as it should be."""

    message: str
    step: int


@dataclass(frozen=True)
class Regroup:
    """Tell the members of a generation that it is over: at once, or once they have completed the step they are at.

    `saves`: they save a checkpoint before.
    """

    generation: GenerationId
    at_boundary: bool
    saves: bool = False


@dataclass(frozen=True)
class Dismiss:
    """Tell a worker that it may leave."""

    worker: int
    pid: int


@dataclass(frozen=True)
class Refill:
    """Tell the supervisor to start another process in a place."""

    worker: int
    after: float
    restore: bool


@dataclass(frozen=True)
class Expel:
    """Tell the supervisor to kill a process that counts as lost."""

    worker: int
    pid: int


@dataclass(frozen=True)
class RelayStop:
    """Tell every worker to stop at the next step boundary."""

    reason: str


@dataclass(frozen=True)
class EndJob:
    """Tell everybody that the job is over."""

    failure: Failure | None
    digest: str = ""
    result: Mapping[str, Any] = field(default_factory=dict)


Action = (
    Welcome
    | Refuse
    | Recall
    | GrantLease
    | RecordEvents
    | RecordLoss
    | RecordResize
    | DeclareGeneration
    | Warn
    | Inform
    | Regroup
    | Dismiss
    | Refill
    | Expel
    | RelayStop
    | EndJob
)


@dataclass(frozen=True)
class Decision:
    """The state that follows, what to do about it, and why in words."""

    state: State
    actions: tuple[Action, ...]
    reason: str
