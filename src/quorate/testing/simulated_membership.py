"""A simulated worker's end of its coordinator's service, as worker/membership.py has it.

Its main thread is a generator that yields what it waits for; heartbeats and directives come beside it, as they do in a
real worker, where they have threads of their own. Its lease and its outbox are the real ones.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from quorate.coordinator.records import (
    Action,
    Completed,
    DeclareGeneration,
    EndJob,
    FailureReported,
    GrantLease,
    HeartbeatReceived,
    MembershipEvent,
    Place,
    Refuse,
    Registered,
    Regroup,
    Welcome,
)
from quorate.core.errors import LeaseExpired, LinkError
from quorate.core.failure import Failure
from quorate.core.generation import Generation, GenerationId
from quorate.core.timing import Timing
from quorate.observe.event import Event
from quorate.testing.clock import Process, VirtualClock
from quorate.testing.network import Network
from quorate.testing.simulated_coordinator import Directive, SimulatedCoordinator
from quorate.testing.task import Holding
from quorate.worker.lease import Lease
from quorate.worker.outbox import Outbox

Wait = tuple[float | None, bool]
"""Seconds to wait at most, and whether a change of anything ends it before."""
Turn = Generator[Wait, None, None]


class JobOver(Exception):  # noqa: N818
    """The coordinator has ended the job, or does not want this worker."""


@dataclass(frozen=True)
class Habits:
    """What a sound worker does. Each habit that is missing is a mistake that the invariants must show."""

    checks_lease: bool = True
    keeps_promises: bool = True
    refuses_stale_frames: bool = True
    finishes_applying: bool = True
    copies_from_the_furthest: bool = True


@dataclass
class Surroundings:
    """What is around every process of a simulation, and who wants to know what becomes of it."""

    clock: VirtualClock
    network: Network
    coordinator: SimulatedCoordinator
    timing: Timing
    on_exit: Callable[["SimulatedMember"], None]
    on_phase: Callable[["SimulatedMember", str], None]
    trace: Callable[[str], None]
    habits: Habits = field(default_factory=Habits)


class SimulatedMember(Process):
    """One process in one place: its main thread, its heartbeats, and what it has heard from the coordinator."""

    def __init__(self, around: Surroundings, slot: int, pid: int, holding: Holding) -> None:
        super().__init__(around.clock, f"worker {slot}")
        self.slot = slot
        self.pid = pid
        self.holding = holding
        self.exit_code: int | None = None
        self.phase = ""
        self._around = around
        self._habits = around.habits
        self._network = around.network
        self._timing = around.timing
        self._lease = Lease(around.timing, around.clock.time)
        self._outbox = Outbox()
        # What has been heard from the coordinator.
        self._generation: Generation | None = None
        self._over: GenerationId | None = None
        self._break_at: GenerationId | None = None
        self._stop: str | None = None
        self._end: EndJob | None = None
        # The connection that directives come over.
        self._stream = 0
        self._told = 0
        self._early: dict[int, Directive] = {}
        self._tell: Callable[[int, Directive], None] | None = None
        # The main thread.
        self._turn = 0
        self._wakes = False
        self._program = self._live()
        self.do(self._advance)

    @property
    def address(self) -> str:
        """Where the others find it."""
        return f"host:{self.pid}"

    def _live(self) -> Turn:
        """What the main thread does."""
        raise NotImplementedError

    def _close_links(self) -> None:
        """Let go of the others."""
        raise NotImplementedError

    def lease_remaining(self) -> float:
        """Seconds for which it may act."""
        return self._lease.remaining()

    def die(self) -> None:
        """Be killed: the kernel closes its sockets."""
        if self.is_alive:
            self._around.trace(f"worker {self.slot} (pid {self.pid}) dies in {self.phase}")
            super().die()
            self._depart()

    def _exit(self, code: int) -> None:
        self._around.trace(f"worker {self.slot} (pid {self.pid}) exits with code {code}")
        self.exit_code = code
        super().die()
        self._depart()

    def _depart(self) -> None:
        if self._tell is not None:
            self._around.coordinator.forget(self._tell)
        self._close_links()
        self._around.on_exit(self)

    # --- the main thread

    def _advance(self) -> None:
        """Let the main thread run until it waits again."""
        self._turn += 1
        try:
            seconds, self._wakes = next(self._program)
        except StopIteration:
            self._exit(0)
        except JobOver:
            self._exit(3)
        except LinkError as error:
            self._give_up(error)
        else:
            if seconds is not None:
                turn = self._turn
                self.after(seconds, lambda: self._advance() if turn == self._turn else None)

    def _notify(self) -> None:
        """Something has changed: whoever waits for it looks."""
        if self._wakes:
            self._wakes = False
            self._advance()

    def _give_up(self, error: LinkError) -> None:
        self._around.trace(f"worker {self.slot} (pid {self.pid}) gives up: {error}")
        self._tell_coordinator(FailureReported(self.slot, Failure.of(error)))
        self._exit(1)

    def _until(self, condition: Callable[[], bool], seconds: float | None = None) -> Turn:
        """Wait for a condition, or until the time is over."""
        over = None if seconds is None else self.clock.now + seconds
        while not condition():
            remaining = None if over is None else over - self.clock.now
            if remaining is not None and remaining <= 0:
                return
            yield remaining, True

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self._around.on_phase(self, phase)

    # --- what it says

    def _register(self) -> Turn:
        self._enter("register")
        sent = self.clock.now
        event = Registered(self.slot, self.pid, "a", self.address, cursor=self.holding.cursor)
        answer = yield from self._call(event, self._timing.connect)
        if answer is None:
            raise LinkError("the coordinator does not answer")
        for action in answer:
            if isinstance(action, Refuse):
                raise JobOver
            if isinstance(action, Welcome):
                self._lease.renew(sent, action.lease)
        self._follow()
        self._beat()

    def _await_generation(self, after: Generation | None) -> Generator[Wait, None, Generation]:
        self._enter("wait")
        while True:
            if self._end is not None:
                raise JobOver
            if self._generation is not None and self._generation is not after:
                return self._generation
            self._check_coordinator()
            yield self._timing.heartbeat_every, True

    def _check_coordinator(self) -> None:
        if self._lease.remaining() <= 0 and self._habits.checks_lease:
            raise LeaseExpired("the coordinator has not answered for too long")

    def _publish(self, event: Event) -> None:
        """Tell an event with the next heartbeat."""
        self._outbox.put(event)

    def _tell_coordinator(
        self, event: MembershipEvent, answer: Callable[[Sequence[Action]], None] | None = None
    ) -> None:
        """Make a call; it is answered, sooner or later, if neither it nor the answer is lost."""
        coordinator = self._around.coordinator

        def reply(actions: Sequence[Action]) -> None:
            if answer is not None:
                self._network.send(coordinator, self, lambda: answer(actions))

        serve = coordinator.complete if isinstance(event, Completed) else coordinator.hear
        self._network.send(self, coordinator, lambda: serve(event, reply))

    def _call(self, event: MembershipEvent, seconds: float) -> Generator[Wait, None, Sequence[Action] | None]:
        """The answer to a call, or None after so many seconds."""
        answers: list[Sequence[Action]] = []

        def heed(actions: Sequence[Action]) -> None:
            answers.append(actions)
            self._notify()

        self._tell_coordinator(event, heed)
        yield from self._until(lambda: bool(answers) or self._end is not None, seconds)
        return answers[0] if answers else None

    def _call_until_answered(self, event: MembershipEvent) -> Generator[Wait, None, Sequence[Action]]:
        while True:
            answer = yield from self._call(event, self._timing.failure_timeout)
            if answer is not None:
                return answer
            if self._end is not None:
                raise JobOver
            self._check_coordinator()
            yield self._timing.heartbeat_every, False

    # --- the heartbeat thread

    def _beat(self) -> None:
        """Send a heartbeat, and the next one when it is answered, or has gone unanswered for too long."""
        sent = self.clock.now
        batch = self._outbox.next_batch()
        generation = self._generation.id if self._generation else GenerationId(0, 0)
        place = Place(self.holding.cursor.step + 1, self.phase)
        event = HeartbeatReceived(self.slot, generation, batch.sequence, place, tuple(batch.lines), self.pid)
        is_over: list[bool] = []

        def next_one(seconds: float) -> None:
            is_over.append(True)
            self.after(seconds, self._beat)

        def heed(actions: Sequence[Action]) -> None:
            if is_over:
                return  # it was given up, or this is the same answer once more
            self._outbox.answered()
            for action in actions:
                if isinstance(action, GrantLease):
                    self._lease.renew(sent, action.seconds)
            next_one(self._timing.heartbeat_every)

        self._tell_coordinator(event, heed)
        self.after(self._timing.lease / 2, lambda: next_one(self._timing.heartbeat_every) if not is_over else None)

    # --- the follow thread

    def _follow(self) -> None:
        """Ask for all that was declared, from the beginning; a message that is lost breaks the connection."""
        self._stream += 1
        self._told, self._early = 0, {}
        stream, coordinator = self._stream, self._around.coordinator
        if self._tell is not None:
            coordinator.forget(self._tell)

        def break_off() -> None:
            self.do(lambda: self._break_off(stream))

        def tell(index: int, directive: Directive) -> None:
            self._network.send(coordinator, self, lambda: self._hear(stream, index, directive), break_off)

        self._tell = tell
        self._network.send(self, coordinator, lambda: self._begin_stream(stream, tell), break_off)

    def _begin_stream(self, stream: int, tell: Callable[[int, Directive], None]) -> None:
        if stream == self._stream and self.is_alive:
            self._around.coordinator.forget(tell)
            self._around.coordinator.follow(tell)

    def _break_off(self, stream: int) -> None:
        if stream == self._stream:
            self._stream += 1
            self.after(self._timing.heartbeat_every, self._follow)

    def _hear(self, stream: int, index: int, directive: Directive) -> None:
        """A connection keeps the order of what is said."""
        if stream != self._stream or index < self._told:
            return
        self._early[index] = directive
        while self._told in self._early:
            self._told += 1
            self._heed(self._early.pop(self._told - 1))
        self._notify()

    def _heed(self, directive: Directive) -> None:
        match directive:
            case DeclareGeneration(generation):
                self._adopt(generation)
            case Regroup(generation_id, at_boundary):
                if at_boundary:
                    self._break_at = generation_id
                else:
                    self._over = generation_id
            case EndJob():
                self._end = directive
                self._lease.end()
            case _:
                self._stop = directive.reason

    def _adopt(self, generation: Generation) -> None:
        is_ours = any((member.worker, member.address) == (self.slot, self.address) for member in generation.members)
        if is_ours and (self._generation is None or generation.id > self._generation.id):
            self._generation = generation
