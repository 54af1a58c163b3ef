"""A worker's end of its coordinator's service: its place, its lease, its generation, and how the job ends."""

import json
import logging
import math
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quorate.core.errors import DivergedError, FrameError, JobError, LeaseExpired, LinkError
from quorate.core.failure import Failure
from quorate.core.generation import Cursor, Generation, Pace, WorkerStatus
from quorate.core.machine import why_no_thread
from quorate.core.timing import SYSTEM, ClockOffset, Latch, RemoteClock, Runtime, Thread, Timing
from quorate.training.strategy import NOTHING_ASKED, Save, StepRequest
from quorate.wire.link import Deadline
from quorate.wire.proto import coordinator_pb2 as pb
from quorate.wire.proto.channel import (
    decode_cursor,
    decode_failure,
    encode_cursor,
    encode_failure,
    encode_id,
    encode_pace,
    encode_position,
)
from quorate.worker.coordinator_link import CoordinatorLink, Request
from quorate.worker.heartbeats import Lease, Outbox
from quorate.worker.membership_view import JobEnded, MembershipView

log = logging.getLogger(__name__)
_REPORT_LIMIT = 2.0
_REST_LIMIT = 0.5


@dataclass(eq=False)
class Membership:
    """A worker's membership of its job. `view` is what it has heard and promised so far. `publish` tells an event with
    the next heartbeat; it never waits. `lease_remaining` are the seconds for which this worker may act.

    `patience` is for how many seconds after the end of its lease a coordinator may still be followed by another: on the
    launcher's host without end, since a worker there dies with its launcher, who replaces coordinators.

    Two threads work from `register` to `close`: one sends heartbeats, one follows what the coordinator declares.

    The worker forks again later, for its loaders. That is safe because they never touch gRPC, whose threads they do
    not have, and because GRPC_ENABLE_FORK_SUPPORT=false keeps gRPC from stopping its threads around every fork.
    """

    link: CoordinatorLink
    timing: Timing
    status: Callable[[], WorkerStatus]
    pace: Callable[[], Pace | None] = lambda: None
    runtime: Runtime = SYSTEM
    newest_incarnation: Callable[[], int] = lambda: 0
    patience: float = math.inf

    def __post_init__(self) -> None:
        # Of the coordinator that has answered last.
        self._incarnation = 0
        self._closing = Latch(self.runtime)
        self._lease = Lease(self.timing, self.runtime.now)
        self._outbox = Outbox(self._closing.wake)
        self.lease_remaining, self.publish = self._lease.remaining, self._outbox.publish
        self._coordinator_clock = RemoteClock()
        # Of the thread that sends heartbeats, and of whoever has something to tell at once: one is sent at a time.
        self._turn = self.runtime.condition()
        self._is_sending = False
        self.view = MembershipView(self.runtime)
        self._registration: pb.RegisterRequest | None = None
        self._is_leaving = False
        self._deaf = ""
        self._threads: list[Thread] = []

    # --- joining

    def register(self, registration: pb.RegisterRequest) -> None:
        """Ask for a place: it says who this worker is, and what it starts from; `slot` is the worker id that it wishes
        for. Raises DivergedError, FrameError or JobEnded when it is refused."""
        cursor = decode_cursor(registration.cursor)
        self.view.join(registration.slot, registration.pid, registration.ring_address, cursor)
        # A worker elsewhere may not reach it at all, and should say so. It holds nothing yet.
        self._enrol(registration, self.timing.connect if math.isfinite(self.patience) else math.inf)
        self._registration = registration
        for name, work in (("heartbeat", self._keep_beating), ("follow", self._keep_following)):
            self._threads.append(self.runtime.spawn(f"membership-{name}", work))

    def _enrol(self, request: pb.RegisterRequest, within: float) -> int:
        """Register, however often that has to be asked for in so many seconds; the incarnation that has answered."""
        sent = self.runtime.now()
        reply = self._ask_until_answered(request, lambda: self.runtime.now() < sent + within)
        if reply is None:
            waited = f"{max(within, self.timing.failure_timeout):.1f} s"
            raise LinkError(f"the coordinator at {self.link.address} does not answer: nothing came within {waited}")
        refusal = decode_failure(reply.refusal)
        if refusal is not None:
            self._lease.renew(sent, 0.0)
            own_kinds = {kind.__name__: kind for kind in (DivergedError, FrameError)}
            raise own_kinds[refusal.kind](refusal.message) if refusal.kind in own_kinds else JobEnded(refusal)
        self._renew(sent, reply)
        return int(reply.incarnation)

    def _present_again(self, incarnation: int) -> None:
        """Come back to a coordinator that was started again: it learns from its workers how far the job is."""
        position = self.view.present(incarnation)
        log.info("the coordinator was started again: this worker presents itself at step %d", position.cursor.step)
        try:
            again = pb.RegisterRequest(position=encode_position(position))
            again.MergeFrom(self._registered())
            # Asked once: if only the answer was lost, a generation may have begun since, and the position be an old
            # one. The next heartbeat learns whether another coordinator has to be told where it stands by then.
            answered = self._enrol(again, within=0.0)
            if answered > incarnation:  # by one after the one that asked: what it was told holds for it as well
                self.view.present(answered)
        except (LinkError, JobError) as error:
            # Whoever is not wanted any more has no lease, and is told why when it reports its state.
            log.info("the coordinator did not take it up: %s", error)

    def await_generation(self, after: Generation | None = None) -> Generation:
        """Wait for a generation that this worker belongs to, newer than the given one, and for leave to act in it."""
        # A coordinator that is gone forms no generation.
        pause = self.timing.heartbeat_every
        generation = self.view.await_generation(after, self._check_coordinator_returns, pause)
        while self.lease_remaining() <= 0 and not self.view.ended:
            self._check_coordinator_returns()
            self._closing.wait(pause / 10)
        return generation

    def report_state(
        self, generation: Generation, cursor: Cursor, symptom: Failure | None, *, is_saved: bool = False
    ) -> None:
        """Promise that this worker has left a generation, and stands at a cursor until the next. Raises JobEnded.

        `is_saved`: there is a checkpoint of it.
        """
        registration = self._registered()
        self.view.leave(cursor)
        report = pb.StateReport(
            worker=registration.slot,
            pid=registration.pid,
            generation=encode_id(generation.id),
            cursor=encode_cursor(cursor),
            symptom=encode_failure(symptom),
            saved=is_saved,
            has_trained=self.view.has_trained,
        )
        reply = self._ask_until_answered(report, self._may_still_be_answered)
        while reply is not None and reply.unknown:
            self._present_again(reply.incarnation)
            self._check_coordinator_returns()
            self._closing.wait(self.timing.heartbeat_every)
            reply = self._ask_until_answered(report, self._may_still_be_answered)
        refusal = decode_failure(reply.refusal) if reply else self.view.failure
        if reply is None or refusal is not None:
            raise JobEnded(refusal)

    # --- acting

    def clock_offset(self) -> ClockOffset | None:
        """How far the coordinator's clock is ahead of this worker's monotonic one; None if it has told no time."""
        return self._coordinator_clock.offset(self.runtime.now())

    def check_lease(self) -> None:
        """Raise LeaseExpired, GenerationOver or JobEnded when this worker may act no longer."""
        if self.view.is_over:
            self.view.check()
        if self._lease.remaining() <= 0:
            raise LeaseExpired(self._lease.explain(self.link.address))

    def check_commit(self) -> None:
        """Raise when this worker may not commit a checkpoint. The end of the job does not forbid it: it forms no other
        generation, and what all had agreed on before stays true."""
        if self.view.ended:
            return
        self.check_lease()
        # The one that answers this worker may have been replaced behind a cut cable, and know nothing of it.
        if (newest := self.newest_incarnation()) > self._incarnation:
            raise LeaseExpired(
                f"the lease is of coordinator {self._incarnation} of this run, and there is coordinator {newest} now"
            )

    def ask_to_leave(self) -> None:
        """Tell with every heartbeat from now on that this worker has to leave. Only a flag: signal handlers call it."""
        self._is_leaving = True

    def requested(self) -> StepRequest:
        """What the coordinator asks for at the next step boundary."""
        asked = self.view
        if not asked.is_asked:  # as at almost every step
            return NOTHING_ASKED
        save = Save.COMMIT if asked.save_requested else Save.BEGIN if asked.save_asked else Save.NONE
        return StepRequest(asked.stop_requested, save, asked.break_requested or asked.save_requested)

    # --- leaving

    def report_failure(self, failure: Failure) -> None:
        """Tell why this worker stops, after the events before it. Never raises: the supervisor sees the exit anyway."""
        limit = min(self.timing.failure_timeout, _REPORT_LIMIT)
        try:
            self._flush_for(limit)
            if not self.view.ended:
                registration = self._registration
                report = pb.FailureReport(
                    worker=registration.slot if registration else None,
                    failure=encode_failure(failure),
                    pid=registration.pid if registration else os.getpid(),
                    generation=encode_id(self.view.generation_id),
                )
                if self.link.call(report, limit) is None:
                    raise LinkError("it does not answer")
        except Exception as error:
            log.warning("cannot tell the coordinator at %s why this worker stops: %r", self.link.address, error)

    def flush(self) -> None:
        """Send what is queued, for as long as this worker may act. Raises LeaseExpired if that is not long enough, and
        JobEnded where the job has ended and what was queued could not be told any more."""
        has_arrived = self._flush(self._lease.remaining)
        try:
            self.check_lease()
        except JobEnded:
            # What is told after the end is written down, too, as long as there is a coordinator.
            if not has_arrived and not self._flush_for(_REST_LIMIT):
                raise

    def flush_before_report(self) -> None:
        """Send what is queued, for as long as a coordinator may come back that could hear a state report, too."""
        self._flush(lambda: -1.0 if self.view.ended else self._lease.hope(self.patience))

    def flush_last(self) -> None:
        """Send what is queued although the job has ended: it is written down still. Never raises, and is brief."""
        try:
            self._flush_for(_REST_LIMIT)
        except Exception as error:
            log.warning("cannot tell the coordinator at %s the last events: %r", self.link.address, error)

    def complete(self, digest: str, result: Mapping[str, Any]) -> bool:
        """Tell that this worker is done, and wait until all are, with equal digests. Otherwise raises JobEnded.

        False if the generation has broken meanwhile: somebody was lost who was not done.
        """
        registration = self._registered()
        # The lease grows with every answer, so a long queue has its time as long as the coordinator takes it.
        self._flush(self._lease.remaining)
        request = pb.CompleteRequest(
            worker=registration.slot,
            pid=registration.pid,
            generation=encode_id(self.view.generation_id),
            weights_digest=digest,
            result=json.dumps(dict(result)),
        )
        reply = self._ask_until_answered(request, self._may_still_be_answered)
        if reply is not None and reply.regroup:
            return False
        failure = decode_failure(reply.failure) if reply else self.view.failure
        if failure is not None:
            raise JobEnded(failure)
        return True

    def close(self) -> None:
        self._closing.set()
        self.link.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    # --- asking

    def _registered(self) -> pb.RegisterRequest:
        assert self._registration is not None, "a worker registers first"
        return self._registration

    def _ask_until_answered(self, request: Request, go_on: Callable[[], bool]) -> Any:
        """The reply, however often it has to be asked for; None once `go_on` says no."""
        while True:
            reply = self.link.call(request, self.timing.failure_timeout)
            if reply is not None or not go_on():
                return reply
            if self._closing.is_set:
                # A link that is closed gives no answer, and that at once: to ask on would keep a core busy.
                raise LinkError(f"the link to the coordinator at {self.link.address} was closed")
            self._closing.wait(self.timing.heartbeat_every)

    def _may_still_be_answered(self) -> bool:
        if self.view.ended:
            return False
        self._check_coordinator_returns()
        return True

    def _check_coordinator_returns(self) -> None:
        """Give up on a coordinator that has been away for too long, or that cannot be heard here.

        Whoever waits does nothing that needs a lease, and gives it the time in which it may be started again: what this
        worker has trained since the newest checkpoint would end with it.
        """
        if self._deaf:
            raise JobError(self._deaf)
        if self._lease.hope(self.patience) <= 0:
            raise LeaseExpired(self._lease.explain_giving_up(self.link.address, self.patience))

    # --- heartbeats

    def _flush_for(self, seconds: float) -> bool:
        end = self.runtime.now() + seconds
        return self._flush(lambda: end - self.runtime.now())

    def _flush(self, deadline: Deadline) -> bool:
        """Send what is queued by now, for as long as `deadline` allows; whether all of it has arrived. What others
        queue meanwhile is not waited for: a training that is fast enough would never let it end."""
        wanted = self._outbox.queued
        while self._registration is not None and self._outbox.arrived < wanted:
            remaining = deadline()
            if remaining <= 0 or self._closing.is_set:
                return False
            if not self._beat(min(remaining, self.timing.failure_timeout)):
                self._closing.wait(min(self.timing.heartbeat_every, max(0.0, deadline())))
        return True

    def _keep_beating(self) -> None:
        while not self._closing.is_set:
            wakes = self._closing.wakes
            try:
                has_arrived = self._beat(self.timing.lease / 2)
            except Exception:
                # Without heartbeats a worker that could go on would count as lost.
                log.exception("a heartbeat could not be sent")
                has_arrived = False
            # A burst of events goes out at once; a coordinator that is away is not hurried.
            if not has_arrived or self._outbox.is_empty:
                self._closing.wait(self.timing.heartbeat_every, since=wakes)

    def _beat(self, timeout: float) -> bool:
        """Send one; whether it was answered. A coordinator that restarts is away for a while: no error."""
        end = self.runtime.now() + timeout
        with self._turn:
            if not self._turn.wait_for(lambda: not self._is_sending, timeout):
                return False
            self._is_sending = True
        try:
            status, batch = self.status(), self._outbox.next_batch()
            request = pb.HeartbeatRequest(
                worker=self._registered().slot,
                generation=encode_id(self.view.generation_id),
                sequence=batch.sequence,
                step=status.step,
                phase=status.phase,
                events=batch.lines,
                pid=self._registered().pid,
                leaving=self._is_leaving,
                pace=encode_pace(self.pace()),
                moves=status.moves,
                waits_for=status.waits_for,
            )
            sent = self.runtime.now()
            reply = self.link.call(request, max(0.0, end - sent))
            if reply is None:
                self._lease.unanswered()
                return False
            if reply.unknown:  # to one that was started after the one that knew this worker
                self._present_again(reply.incarnation)
                return False
            self._outbox.answered()
            self._renew(sent, reply)
            return True
        except LinkError as error:
            log.debug("a heartbeat was not taken: %r", error)
            self._lease.unanswered()
            return False
        finally:
            with self._turn:
                self._is_sending = False
                self._turn.notify_all()

    def _renew(self, sent: float, reply: pb.RegisterReply | pb.HeartbeatReply) -> None:
        self._lease.renew(sent, reply.lease)
        self._incarnation = reply.incarnation
        if reply.time:
            self._coordinator_clock.add(sent, reply.time, self.runtime.now(), reply.incarnation)

    # --- following

    def _keep_following(self) -> None:
        request = pb.FollowRequest(worker=self._registered().slot)
        while not self._closing.is_set and not self.view.ended:
            try:
                for directive in self.link.follow(request):
                    if directive.HasField("end"):
                        self._lease.end()
                    self.view.handle(directive)
            except Exception as error:
                # Whoever hears nothing any more, and sends heartbeats all the same, would be waited for for ever.
                log.exception("a directive of the coordinator could not be followed")
                self._deaf = why_no_thread(error)
            if not self.view.ended:
                self._closing.wait(self.timing.heartbeat_every)
