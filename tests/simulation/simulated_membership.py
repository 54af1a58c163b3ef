"""A simulated worker's end of its coordinator's service: the real membership, over a simulated link.

What a sound worker does is the real code. What a mistaken one does differently is here, for the mutants.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from quorate.coordinator.events import Completed
from quorate.coordinator.service import event_of, reply_to
from quorate.core.errors import GenerationOver, JobError
from quorate.core.failure import Failure
from quorate.core.generation import Cursor, Generation, GenerationId, Pace, Position, WorkerStatus
from quorate.core.timing import Timing
from quorate.wire.proto import coordinator_pb2 as pb
from quorate.worker.coordinator_link import Request
from quorate.worker.membership import Membership
from quorate.worker.membership_view import JobEnded, MembershipView
from simulation.clock import Process
from simulation.network import Network
from simulation.simulated_coordinator import SimulatedCoordinator
from simulation.threads import SimulatedRuntime

RECONNECT = 0.02
"""Seconds after which a coordinator that is away is tried again."""


@dataclass(frozen=True)
class Habits:
    """What a sound worker, and its supervisor, does. What is missing is a mistake that the invariants must show.

    Of `takes_fresh_memory` and `kills_the_expelled`, either is enough to keep shared memory whole.
    """

    checks_lease: bool = True
    keeps_promises: bool = True
    refuses_stale_frames: bool = True
    finishes_applying: bool = True
    copies_from_the_furthest: bool = True
    takes_fresh_memory: bool = True
    kills_the_expelled: bool = True
    ignores_late_words: bool = True
    checks_incarnations: bool = True
    goes_by_who_recalls: bool = True
    completes_what_others_have: bool = True
    drops_blocks_of_other_steps: bool = True
    drops_no_block_before_all_have_theirs: bool = True


class SimulatedLink:
    """A worker's calls, over the simulated network, to whoever is the coordinator at the time."""

    address = "coordinator"

    def __init__(
        self,
        worker: Process,
        network: Network,
        coordinator: Callable[[], SimulatedCoordinator],
        runtime: SimulatedRuntime,
    ) -> None:
        self._worker = worker
        self._network = network
        self._coordinator = coordinator
        self._runtime = runtime
        # Calls that have not been answered, and whom they were made to; and what is followed.
        self._calls: list[tuple[SimulatedCoordinator, Callable[[Any], None]]] = []
        self._stream: _Stream | None = None
        # By the clock of its host, how long it may act: counted here from the sending of what was granted.
        self.leased_until = 0.0
        self._lags_behind: SimulatedCoordinator | None = None

    def call(self, request: Request, timeout: float) -> Any:
        """The reply, once there is a coordinator to give it; None if it does not come in time, or any more."""
        event = event_of(request)
        sent = self._runtime.now()
        answered, replies = self._runtime.condition(), list[Any]()

        def finish(reply: Any) -> None:
            self._calls = [call for call in self._calls if call[1] is not finish]
            if not replies:  # it may have been given up, or this is the same answer once more
                replies.append(reply)
                answered.notify_all()

        def send() -> None:
            coordinator = self._coordinator()
            if replies:
                return
            if not coordinator.is_alive:
                self._worker.after(RECONNECT, send)
                return
            self._calls.append((coordinator, finish))

            def answer(reply: Any) -> None:
                self._network.send(coordinator, self._worker, lambda: finish(reply))

            def serve() -> None:
                if isinstance(event, Completed):
                    coordinator.complete(event, answer)
                else:
                    incarnation = coordinator.incarnation
                    coordinator.hear(event, lambda actions: answer(reply_to(request, actions, incarnation)))

            self._network.send(self._worker, coordinator, serve)

        send()
        with answered:
            answered.wait_for(lambda: bool(replies), timeout)
        if not replies:
            finish(None)
        self._note_lease(sent, replies[0])
        return replies[0]

    def _note_lease(self, sent: float, reply: Any) -> None:
        if isinstance(reply, pb.RegisterReply | pb.HeartbeatReply) and reply.lease:
            self.leased_until = max(self.leased_until, sent + reply.lease)

    def follow(self, request: pb.FollowRequest) -> Iterator[pb.Directive]:
        """What a coordinator declares, from the beginning; a message that is lost breaks the connection."""
        while not (coordinator := self._coordinator()).is_alive:
            self._runtime.sleep(RECONNECT)
        stream = self._stream = _Stream(coordinator, self._runtime)
        begun: list[bool] = []
        break_off = partial(self._worker.do, stream.break_off)

        def tell(directive: pb.Directive) -> None:
            index = stream.sent
            stream.sent += 1
            self._network.send(coordinator, self._worker, lambda: self._hear(stream, index, directive), break_off)

        def begin() -> None:
            if not stream.is_broken and not begun and self._worker.is_alive:
                begun.append(True)
                coordinator.follow(tell)

        self._network.send(self._worker, coordinator, begin, break_off)
        try:
            yield from stream.directives()
        finally:
            coordinator.forget(tell)

    def _hear(self, stream: "_Stream", index: int, directive: pb.Directive) -> None:
        if self._lags_behind is stream.coordinator:
            stream.unread.append((index, directive))
        else:
            stream.hear(index, directive)

    def close(self) -> None:
        """Nobody closes a simulated link: processes exit, or die."""

    def lose_calls(self, coordinator: SimulatedCoordinator) -> None:
        """The connection to a coordinator is broken: what was asked over it is not answered."""
        for finish in [finish for called, finish in self._calls if called is coordinator]:
            finish(None)

    def lag_behind(self, coordinator: SimulatedCoordinator) -> None:
        """Read what a coordinator has said only later."""
        self._lags_behind = coordinator

    def lose_stream(self, coordinator: SimulatedCoordinator) -> None:
        """Read what a coordinator has said last; nothing more comes from it."""
        self._lags_behind = None
        if self._stream is not None and self._stream.coordinator is coordinator:
            for index, directive in self._stream.unread:
                self._stream.hear(index, directive)
            self._stream.break_off()


class _Stream:
    """One connection that directives come over, in their order."""

    def __init__(self, coordinator: SimulatedCoordinator, runtime: SimulatedRuntime) -> None:
        self.coordinator = coordinator
        self.sent = 0
        self.is_broken = False
        # What has arrived and not been read by a worker that lags behind.
        self.unread: list[tuple[int, pb.Directive]] = []
        self._changed = runtime.condition()
        self._heard = 0
        self._early: dict[int, pb.Directive] = {}
        self._ready: deque[pb.Directive] = deque()

    def hear(self, index: int, directive: pb.Directive) -> None:
        """One has come; it is read after those that were sent before it."""
        if self.is_broken or index < self._heard:
            return
        self._early[index] = directive
        while self._heard in self._early:
            self._ready.append(self._early.pop(self._heard))
            self._heard += 1
        self._changed.notify_all()

    def break_off(self) -> None:
        """Nothing more comes."""
        self.is_broken = True
        self._changed.notify_all()

    def directives(self) -> Iterator[pb.Directive]:
        """What comes, until it breaks off."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._ready) or self.is_broken)
            if not self._ready:
                return
            yield self._ready.popleft()


class Promising(Protocol):
    """A worker, as its membership sees it."""

    promised: GenerationId | None

    def enter(self, phase: str) -> None:
        """It begins with something else."""
        ...

    def break_promise(self, generation: Generation) -> None:
        """Take a step of a generation that it has left."""
        ...


class SimulatedMembership(Membership):
    """The real one, which also lets the simulation know of phases and promises; or one without some of its habits."""

    def __init__(
        self,
        worker: Promising,
        link: SimulatedLink,
        timing: Timing,
        status: Callable[[], WorkerStatus],
        pace: Callable[[], Pace | None],
        runtime: SimulatedRuntime,
        habits: Habits,
    ) -> None:
        super().__init__(link, timing, status, pace, runtime)
        self._worker = worker
        self._habits = habits
        self._welcomed_by = 0
        if not habits.ignores_late_words:
            self.view = Credulous(runtime)
        elif not habits.checks_incarnations:
            self.view = WithoutIncarnations(runtime)

    def await_generation(self, after: Generation | None = None) -> Generation:
        """Wait for the next."""
        self._worker.enter("wait")
        if self._habits.checks_lease:
            return super().await_generation(after)
        return self.view.await_generation(after, self._check_coordinator_returns, self.timing.heartbeat_every)

    def check_lease(self) -> None:
        """Raise when this worker may act no longer."""
        if self._habits.checks_lease:
            super().check_lease()
        else:
            self.view.check()

    def check_generation(self) -> None:
        """Raise when its generation, or the job, is over."""
        self.view.check()

    @property
    def is_over(self) -> bool:
        """Whether its generation, or the job, is over."""
        try:
            self.view.check()
        except (GenerationOver, JobEnded):
            return True
        return False

    def report_state(
        self, generation: Generation, cursor: Cursor, symptom: Failure | None, *, is_saved: bool = False
    ) -> None:
        """Promise to have left a generation."""
        self._worker.promised = generation.id
        if not self._habits.keeps_promises:
            self.runtime.spawn("early", partial(self._report_early, generation, cursor, symptom, is_saved))
            self._worker.break_promise(generation)
        super().report_state(generation, cursor, symptom, is_saved=is_saved)

    def _report_early(self, generation: Generation, cursor: Cursor, symptom: Failure | None, is_saved: bool) -> None:
        with contextlib.suppress(JobError):
            super().report_state(generation, cursor, symptom, is_saved=is_saved)

    def _enrol(self, request: pb.RegisterRequest, within: float) -> int:
        answered = super()._enrol(request, within)
        self._welcomed_by = max(self._welcomed_by, answered)
        return answered

    def _present_again(self, incarnation: int) -> None:
        """Heartbeats and the main thread may both be asked to. What comes before the incarnation of who asks is over,
        and not what comes before the next after the one that this worker has come back to meanwhile."""
        super()._present_again(incarnation if self._habits.goes_by_who_recalls else self._welcomed_by + 1)


class Credulous(MembershipView):
    """Takes a late word of an earlier coordinator for one of the coordinator to which it has presented itself."""

    def present(self, incarnation: int) -> Position:
        """Without raising the lowest incarnation that it listens to."""
        return super().present(-1)


class WithoutIncarnations(MembershipView):
    """Adopts a generation of whatever coordinator, as long as it is newer than its own."""

    def _adopt(self, generation: Generation) -> None:
        lowest, self._lowest_incarnation = self._lowest_incarnation, 0
        super()._adopt(generation)
        self._lowest_incarnation = lowest
