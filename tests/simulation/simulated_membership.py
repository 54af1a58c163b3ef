"""A simulated worker's end of its coordinator's service, as worker/membership.py has it.

Its main thread is a generator that yields what it waits for; heartbeats and directives come beside it, as they do in a
real worker, where they have threads of their own. Its lease, its standing and its outbox are the real ones.
"""

import contextlib
import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from quorate.coordinator.actions import Action, GrantLease, Recall, Refuse, Welcome
from quorate.coordinator.events import Completed, FailureReported, HeartbeatReceived, MembershipEvent, Place, Registered
from quorate.core.errors import GenerationOver, LeaseExpired, LinkError, ReplicasDiffer
from quorate.core.failure import Failure
from quorate.core.generation import Generation
from quorate.core.timing import Timing
from quorate.core.worker_status import DIVERGED, Position
from quorate.observe.event import Event
from quorate.wire.proto import coordinator_pb2 as pb
from quorate.worker.lease import Lease
from quorate.worker.membership_view import Dismissed, JobEnded, MembershipView
from quorate.worker.outbox import Outbox
from simulation.clock import Clock, Process
from simulation.network import Network
from simulation.simulated_coordinator import SimulatedCoordinator
from simulation.task import Holding

Wait = tuple[float | None, bool]
"""Seconds to wait at most, and whether a change of anything ends it before."""
Turn = Generator[Wait, None, None]

RECONNECT = 0.02
"""Seconds after which a coordinator that is away is tried again."""
_INSTANT = 1e-9


class JobOver(Exception):
    """The coordinator does not want this worker."""


class _NotYet(Exception):
    """What is waited for has not come."""


@dataclass(frozen=True)
class Reply:
    """What a call was answered with, and by whom."""

    actions: Sequence[Action]
    incarnation: int

    @property
    def is_recall(self) -> bool:
        """Whether it does not know who called."""
        return any(isinstance(action, Recall) for action in self.actions)

    @property
    def is_refusal(self) -> bool:
        """Whether it does not want who called."""
        return any(isinstance(action, Refuse) for action in self.actions)


class Credulous(MembershipView):
    """Takes a late word of an earlier coordinator for one of the coordinator to which it has presented itself."""

    def present(self, incarnation: int) -> Position:
        """Without raising the lowest incarnation that it listens to."""
        return super().present(-1)


@dataclass(frozen=True)
class Habits:
    """What a sound worker, and its supervisor, does. What is missing is a mistake that the invariants must show.

    Of the last two, either is enough to keep shared memory whole.
    """

    checks_lease: bool = True
    keeps_promises: bool = True
    refuses_stale_frames: bool = True
    finishes_applying: bool = True
    copies_from_the_furthest: bool = True
    takes_fresh_memory: bool = True
    kills_the_expelled: bool = True
    ignores_late_words: bool = True
    goes_by_who_recalls: bool = True


@dataclass
class Surroundings:
    """What is around every worker of a simulation, and who wants to know what becomes of it."""

    network: Network
    coordinator: SimulatedCoordinator
    timing: Timing
    on_exit: Callable[["SimulatedMember"], None]
    on_phase: Callable[["SimulatedMember", str], None]
    trace: Callable[[str], None]
    habits: Habits = field(default_factory=Habits)


class SimulatedMember(Process):
    """One process in one place: its main thread, its heartbeats, and what it has heard from the coordinator."""

    def __init__(self, around: Surroundings, clock: Clock, slot: int, pid: int, holding: Holding) -> None:
        super().__init__(clock, f"worker {slot}")
        self.slot = slot
        self.pid = pid
        self.holding = holding
        self.exit_code: int | None = None
        self.phase = ""
        self._around = around
        self._habits = around.habits
        self._network = around.network
        self._timing = around.timing
        self._lease = Lease(around.timing, clock.time)
        self._outbox = Outbox()
        self._began_at = holding.cursor
        self._view = MembershipView() if around.habits.ignores_late_words else Credulous()
        self._incarnation = 0
        self._presented_to = 0
        self._is_leaving = False
        self._is_flipped = False
        # Calls that have not been answered, and whom they were made to.
        self._calls: list[tuple[SimulatedCoordinator, Callable[[Reply | None], None]]] = []
        # The connection that directives come over.
        self._stream = 0
        self._told = 0
        self._early: dict[int, pb.Directive] = {}
        self._followed: SimulatedCoordinator | None = None
        self._lags_behind: SimulatedCoordinator | None = None
        self._unread: list[Callable[[], None]] = []
        self._hang_up: Callable[[], None] = lambda: None
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

    def flip(self) -> None:
        """A bit of what it holds flips, as bad memory does, when the next step begins that others can tell it by."""
        self._is_flipped = True

    def ask_to_leave(self) -> None:
        """As SIGTERM does."""
        self._is_leaving = True

    def lose_calls(self, coordinator: SimulatedCoordinator) -> None:
        """The connection to a coordinator is broken: what was asked over it is not answered."""
        lost = [finish for called, finish in self._calls if called is coordinator]
        for finish in lost:
            finish(None)

    def lag_behind(self, coordinator: SimulatedCoordinator) -> None:
        """Read what a coordinator has said only later."""
        self._lags_behind = coordinator

    def lose_stream(self, coordinator: SimulatedCoordinator) -> None:
        """Read what a coordinator has said last; nothing more comes from it."""
        unread, self._unread, self._lags_behind = self._unread, [], None
        for hear in unread:
            hear()
        if self._followed is coordinator:
            self._break_off(self._stream)

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
        self._hang_up()
        self._close_links()
        self._around.on_exit(self)

    # --- the main thread

    def _advance(self) -> None:
        """Let the main thread run until it waits again."""
        self._turn += 1
        try:
            seconds, self._wakes = next(self._program)
        except (StopIteration, Dismissed):
            self._exit(0)
        except (JobOver, JobEnded):
            self._exit(3)
        except LinkError as error:
            self._give_up(error)
        except ReplicasDiffer as error:
            # Its word may be lost on the way; its exit code is told until it is heard.
            report = FailureReported(self.slot, Failure.of(error), self.pid, self._view.generation_id)
            self._ask(report, self._timing.failure_timeout)
            self._exit(DIVERGED)
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
        self._ask(FailureReported(self.slot, Failure.of(error)), self._timing.failure_timeout)
        self._exit(1)

    def _until(self, condition: Callable[[], bool], seconds: float | None = None) -> Turn:
        """Wait for a condition, or until the time is over."""
        over = None if seconds is None else self.clock.now + seconds
        while not condition():
            remaining = None if over is None else over - self.clock.now
            if remaining is not None and remaining <= _INSTANT:
                return
            yield remaining, True

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self._around.on_phase(self, phase)

    # --- what it says

    def _register(self) -> Turn:
        self._enter("register")
        self._view.join(self.slot, self.pid, self.address, self.holding.cursor)
        sent = self.clock.now
        reply = yield from self._call(self._registration(), self._timing.connect)
        if reply is None:
            raise LinkError("the coordinator does not answer")
        if reply.is_refusal:
            raise JobOver
        self._take_up(reply, sent)
        self._follow()
        self._beat()

    def _registration(self, position: Position | None = None) -> Registered:
        return Registered(self.slot, self.pid, "a", self.address, cursor=self._began_at, position=position)

    def _take_up(self, reply: Reply, sent: float) -> None:
        for action in reply.actions:
            if isinstance(action, Welcome):
                self._lease.renew(sent, action.lease)
                self._incarnation = max(self._incarnation, reply.incarnation)

    def _present_again(self, recall: Reply, then: Callable[[], None]) -> None:
        """Come back to a coordinator that was started again: it learns from its workers how far the job is.

        Heartbeats and the main thread may both be asked to. What comes before the incarnation of who asks is over, and
        not what comes before the next after the one that this worker has come back to meanwhile.
        """
        self._presented_to = max(self._presented_to, recall.incarnation)
        incarnation = recall.incarnation if self._habits.goes_by_who_recalls else self._incarnation + 1
        position = self._view.present(incarnation)
        sent = self.clock.now
        self._around.trace(f"worker {self.slot} presents itself at step {position.cursor.step}")

        def heed(reply: Reply | None) -> None:
            if reply is not None:
                self._take_up(reply, sent)
            then()

        self._ask(self._registration(position), self._timing.connect, heed)

    def _await_generation(self, after: Generation | None) -> Generator[Wait, None, Generation]:
        self._enter("wait")
        while True:
            with contextlib.suppress(_NotYet):
                generation = self._view.await_generation(after, self._not_yet, 0.0)
                # Whoever begins without a lease leaves at once, and for no reason that the others could do much about.
                if self._lease.remaining() > 0 or not self._habits.checks_lease:
                    return generation
            self._check_coordinator_returns()
            yield self._timing.heartbeat_every, True

    @staticmethod
    def _not_yet() -> None:
        raise _NotYet

    def _check_coordinator(self) -> None:
        if self._lease.remaining() <= 0 and self._habits.checks_lease:
            raise LeaseExpired("the coordinator has not answered for too long")

    def _check_coordinator_returns(self) -> None:
        """Whoever waits does nothing that needs a lease, and gives the next coordinator time to begin."""
        if self._lease.remaining() <= -self._timing.failure_timeout:
            raise LeaseExpired("the coordinator has not come back")

    def _is_over(self) -> bool:
        """Whether its latest generation, or the job, is over."""
        try:
            self._view.check()
        except (GenerationOver, JobEnded):
            return True
        return False

    def _publish(self, event: Event) -> None:
        """Tell an event with the next heartbeat."""
        self._outbox.put(event)

    # --- calls

    def _ask(
        self, event: MembershipEvent, seconds: float, done: Callable[[Reply | None], None] = lambda _: None
    ) -> None:
        """Make a call, once there is a coordinator to answer it; `done` has the answer, or None if there is none."""
        over = self.clock.now + seconds
        is_over: list[bool] = []

        def finish(reply: Reply | None) -> None:
            if not is_over:  # it may have been given up, or this is the same answer once more
                is_over.append(True)
                self._calls = [call for call in self._calls if call[1] is not finish]
                done(reply)

        def send() -> None:
            coordinator = self._around.coordinator
            if is_over:
                return
            if not coordinator.is_alive:
                self.after(RECONNECT, send)
                return
            self._calls.append((coordinator, finish))
            serve = coordinator.complete if isinstance(event, Completed) else coordinator.hear

            def reply(actions: Sequence[Action]) -> None:
                answer = Reply(actions, coordinator.incarnation)
                self._network.send(coordinator, self, lambda: finish(answer))

            self._network.send(self, coordinator, lambda: serve(event, reply))

        send()
        self.after(over - self.clock.now, lambda: finish(None))

    def _call(self, event: MembershipEvent, seconds: float) -> Generator[Wait, None, Reply | None]:
        """The answer to a call, or None: after so many seconds, or when it cannot come any more."""
        replies: list[Reply | None] = []

        def heed(reply: Reply | None) -> None:
            replies.append(reply)
            self._notify()

        self._ask(event, seconds, heed)
        yield from self._until(lambda: bool(replies) or self._view.ended)
        return replies[0] if replies else None

    def _call_until_answered(self, event: MembershipEvent) -> Generator[Wait, None, Reply]:
        while True:
            reply = yield from self._call(event, self._timing.failure_timeout)
            if reply is not None:
                return reply
            if self._view.ended:
                raise JobOver
            self._check_coordinator_returns()
            yield self._timing.heartbeat_every, False

    # --- the heartbeat thread

    def _beat(self) -> None:
        """Send a heartbeat, and the next one when it is answered, or has gone unanswered for too long."""
        sent = self.clock.now
        batch = self._outbox.next_batch()
        place = Place(self.holding.cursor.step + 1, self.phase)
        generation = self._view.generation_id
        event = HeartbeatReceived(
            self.slot, generation, batch.sequence, place, tuple(batch.lines), self.pid, self._is_leaving
        )

        def rest() -> None:
            self.after(self._timing.heartbeat_every, self._beat)

        def heed(reply: Reply | None) -> None:
            if reply is not None and reply.is_recall:
                self._present_again(reply, rest)
                return
            if reply is not None:
                self._outbox.answered()
                for action in reply.actions:
                    if isinstance(action, GrantLease):
                        self._lease.renew(sent, action.seconds)
            rest()

        self._ask(event, self._timing.lease / 2, heed)

    # --- the follow thread

    def _follow(self) -> None:
        """Ask for all that was declared, from the beginning; a message that is lost breaks the connection."""
        coordinator = self._followed = self._around.coordinator
        self._stream += 1
        self._told, self._early = 0, {}
        stream, count, begun = self._stream, itertools.count(), list[bool]()
        if not coordinator.is_alive:
            self.after(RECONNECT, lambda: self._follow() if stream == self._stream else None)
            return

        def break_off() -> None:
            self.do(lambda: self._break_off(stream))

        def tell(directive: pb.Directive) -> None:
            index = next(count)

            def hear() -> None:
                if self._lags_behind is coordinator:
                    self._unread.append(lambda: self._hear(stream, index, directive))
                else:
                    self._hear(stream, index, directive)

            self._network.send(coordinator, self, hear, break_off)

        def begin() -> None:
            if stream == self._stream and self.is_alive and not begun:
                begun.append(True)
                coordinator.follow(tell)

        self._hang_up()
        self._hang_up = lambda: coordinator.forget(tell)
        self._network.send(self, coordinator, begin, break_off)

    def _break_off(self, stream: int) -> None:
        if stream == self._stream:
            self._stream += 1
            self._hang_up()
            self.after(self._timing.heartbeat_every, self._follow)

    def _hear(self, stream: int, index: int, directive: pb.Directive) -> None:
        """A connection keeps the order of what is said."""
        if stream != self._stream or index < self._told:
            return
        self._early[index] = directive
        while self._told in self._early:
            self._told += 1
            heard = self._early.pop(self._told - 1)
            if heard.HasField("end"):
                self._lease.end()
            # The next coordinator counts on whoever has come back to it: an earlier one lets nobody go any more.
            if heard.HasField("dismiss") and self._followed and self._followed.incarnation < self._presented_to:
                continue
            self._view.heed(heard)
        self._notify()
