"""A worker's end of its coordinator's service: its place, its lease, its generation, and how the job ends."""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from quorate.core.cursor import Cursor
from quorate.core.errors import DivergedError, FrameError, GenerationOver, JobError, LeaseExpired
from quorate.core.failure import Failure
from quorate.core.generation import Generation, GenerationId
from quorate.core.timing import Timing
from quorate.observe.event import Event
from quorate.wire.link import Deadline
from quorate.wire.proto import coordinator_pb2 as pb
from quorate.wire.proto.channel import open_channel, token_metadata, unanswered
from quorate.wire.proto.codec import (
    decode_failure,
    decode_generation,
    decode_id,
    encode_cursor,
    encode_failure,
    encode_id,
)
from quorate.wire.proto.coordinator_pb2_grpc import CoordinatorStub
from quorate.worker.lease import Clock, Lease
from quorate.worker.outbox import Outbox

log = logging.getLogger(__name__)

_REPORT_LIMIT = 2.0
_REST_LIMIT = 0.5


@dataclass(frozen=True)
class WorkerStatus:
    """How far a worker is and what it is doing."""

    step: int
    phase: str


@dataclass(frozen=True)
class Registration:
    """Who a worker is, and what it starts from. `slot` is the worker id that it wishes for."""

    slot: int
    pid: int
    host: str
    ring_address: str
    facts: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    cursor: Cursor = field(default_factory=Cursor)
    local_address: str = ""


class JobEnded(JobError):  # noqa: N818 (a happening, not a mistake)
    """The coordinator has ended the job: for somebody's failure, or because it is complete."""

    def __init__(self, failure: Failure | None) -> None:
        self.failure = failure
        super().__init__("the job has ended: " + (failure.message if failure else "it is complete"))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.failure,)


class Membership:
    """A worker's membership of its job.

    Opens a gRPC channel, which starts threads, so it is made in the worker itself, after the nursery's fork. Two more
    threads work from `register` to `close`: one sends heartbeats, one follows what the coordinator declares.

    The worker forks again later, for its loaders. That is safe because they never touch gRPC, whose threads they do
    not have, and because GRPC_ENABLE_FORK_SUPPORT=false keeps gRPC from stopping its threads around every fork.
    """

    def __init__(
        self,
        address: str,
        token: str,
        timing: Timing,
        status: Callable[[], WorkerStatus],
        clock: Clock = time.monotonic,
    ) -> None:
        self._address = address
        self._metadata = token_metadata(token)
        self._timing = timing
        self._status = status
        self._clock = clock
        self._lease = Lease(timing, clock)
        self._outbox = Outbox()
        self._worker: int | None = None
        self._pid = 0
        self._address_on_ring = ""
        self._generation: Generation | None = None
        self._over: GenerationId | None = None
        self._break_at: GenerationId | None = None
        self._stop: str | None = None
        self._ended = False
        self._failure: Failure | None = None
        self._close_links: Callable[[], None] | None = None
        self._changed = threading.Condition()
        self._beat_turn = threading.Lock()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._follow_call: Any = None
        self._channel = open_channel(address)
        self._stub = CoordinatorStub(self._channel)  # type: ignore[no-untyped-call]

    # --- joining

    def register(self, registration: Registration) -> int:
        """Ask for a place; the worker id. Raises DivergedError, FrameError or JobEnded when it is refused."""
        request = pb.RegisterRequest(
            slot=registration.slot,
            pid=registration.pid,
            host=registration.host,
            ring_address=registration.ring_address,
            local_address=registration.local_address,
            facts=dict(registration.facts),
            tensors=[pb.TensorDigest(name=name, digest=digest) for name, digest in registration.tensors.items()],
            cursor=pb.Cursor(step=registration.cursor.step, phase=registration.cursor.phase),
        )
        sent = self._clock()
        try:
            reply = self._call(self._stub.Register, request, self._timing.connect)
        except grpc.RpcError as error:
            raise unanswered(self._address, error) from None
        refusal = decode_failure(reply.refusal)
        if refusal is not None:
            raise _refused(refusal)
        self._lease.renew(sent, reply.lease)
        self._worker = reply.worker
        self._pid, self._address_on_ring = registration.pid, registration.ring_address
        self._start_thread("heartbeat", self._keep_beating)
        self._start_thread("follow", self._keep_following)
        return self._worker

    def await_generation(self, after: Generation | None = None) -> Generation:
        """Wait for a generation that this worker belongs to, newer than the given one."""
        with self._changed:
            while not self._ended and (self._generation is None or self._generation is after):
                # A coordinator that is gone forms no generation.
                self._check_coordinator()
                # A lease moves while we wait, so it is asked again.
                self._changed.wait(self._timing.heartbeat_every)
            if self._ended or self._generation is None:
                raise JobEnded(self._failure)
            return self._generation

    def report_state(self, generation: Generation, cursor: Cursor, symptom: Failure | None) -> None:
        """Promise that this worker has left a generation, and stands at a cursor until the next. Raises JobEnded."""
        assert self._worker is not None, "a worker registers before it leaves a generation"
        report = pb.StateReport(
            worker=self._worker,
            pid=self._pid,
            generation=encode_id(generation.id),
            cursor=encode_cursor(cursor),
            symptom=encode_failure(symptom),
        )
        reply = self._call_until_answered(self._stub.ReportState, report)
        refusal = decode_failure(reply.refusal) if reply else self._failure
        if reply is None or refusal is not None:
            raise JobEnded(refusal)

    # --- acting

    def lease_remaining(self) -> float:
        """Seconds for which this worker may act; not positive when its lease, or the job, is over."""
        return self._lease.remaining()

    def check_lease(self) -> None:
        """Raise LeaseExpired, GenerationOver or JobEnded when this worker may act no longer."""
        if self._ended:
            raise JobEnded(self._failure)
        self._check_coordinator()
        if self._generation is not None and self._over == self._generation.id:
            raise GenerationOver(f"generation {self._over} is over: it has lost a member")

    @property
    def break_requested(self) -> bool:
        """Whether the generation shall end at the next step boundary, to let somebody in."""
        return self._generation is not None and self._break_at == self._generation.id

    @property
    def stop_requested(self) -> str | None:
        """Why the job shall stop at the next step boundary, if it shall."""
        return self._stop

    @property
    def ended(self) -> bool:
        """Whether the coordinator has ended the job."""
        return self._ended

    def close_when_over(self, generation: Generation, close: Callable[[], None]) -> None:
        """Have `close` called when this generation, or the job, is over: from the follow thread, or now if it is."""
        with self._changed:
            self._close_links = close
            is_over = self._ended or self._over == generation.id
        if is_over:
            close()

    def publish(self, event: Event) -> None:
        """Tell an event with the next heartbeat."""
        self._outbox.put(event)

    # --- leaving

    def report_failure(self, failure: Failure) -> None:
        """Tell why this worker stops, after the events before it. Never raises: the supervisor sees the exit anyway."""
        limit = min(self._timing.failure_timeout, _REPORT_LIMIT)
        end = self._clock() + limit
        try:
            self._flush(lambda: end - self._clock())
            if not self._ended:
                report = pb.FailureReport(worker=self._worker, failure=encode_failure(failure))
                self._call(self._stub.ReportFailure, report, limit)
        except Exception as error:
            log.warning("cannot tell the coordinator at %s why this worker stops: %r", self._address, error)

    def tell_the_rest(self) -> None:
        """Send what is queued although the job has ended: it is written down still. Never raises, and is brief."""
        end = self._clock() + _REST_LIMIT
        try:
            self._flush(lambda: end - self._clock())
        except Exception as error:
            log.warning("cannot tell the coordinator at %s the last events: %r", self._address, error)

    def complete(self, digest: str, result: Mapping[str, Any]) -> bool:
        """Tell that this worker is done, and wait until all are, with equal digests. Otherwise raises JobEnded.

        False if the generation has broken meanwhile: somebody was lost who was not done.
        """
        assert self._worker is not None, "a worker registers before it completes"
        # The lease grows with every answer, so a long queue has its time as long as the coordinator takes it.
        self._flush(self.lease_remaining)
        request = pb.CompleteRequest(
            worker=self._worker,
            pid=self._pid,
            generation=encode_id(self._generation.id) if self._generation else None,
            weights_digest=digest,
            result=json.dumps(dict(result)),
        )
        reply = self._call_until_answered(self._stub.Complete, request)
        if reply is not None and reply.regroup:
            return False
        failure = decode_failure(reply.failure) if reply else self._failure
        if failure is not None:
            raise JobEnded(failure)
        return True

    def close(self) -> None:
        """Leave: sends nothing more, and ends the threads."""
        self._closing.set()
        if self._follow_call is not None:
            self._follow_call.cancel()
        self._channel.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _check_coordinator(self) -> None:
        if self._lease.remaining() <= 0:
            raise LeaseExpired(self._lease.explain(self._address))

    def _call_until_answered(self, method: Any, request: Any) -> Any:
        """The answer, however often it has to be asked for; None if the job has ended meanwhile."""
        while True:
            try:
                return self._call(method, request, self._timing.failure_timeout)
            except grpc.RpcError as error:
                if not _may_pass(error):
                    raise unanswered(self._address, error) from None
            if self._ended:
                return None
            self._check_coordinator()
            self._closing.wait(self._timing.heartbeat_every)

    # --- the heartbeat thread

    def _keep_beating(self) -> None:
        while not self._closing.is_set():
            arrived = self._beat(self._timing.lease / 2)
            # A burst of events goes out at once; a coordinator that is away is not hurried.
            if not arrived or self._outbox.is_empty():
                self._closing.wait(self._timing.heartbeat_every)

    def _beat(self, timeout: float) -> bool:
        """Send one heartbeat; whether it was answered. A coordinator that restarts is away for a while: no error."""
        end = self._clock() + timeout
        if not self._beat_turn.acquire(timeout=timeout):
            return False
        try:
            request = self._next_heartbeat()
            sent = self._clock()
            reply = self._call(self._stub.Heartbeat, request, max(0.0, end - sent))
            self._outbox.answered()
            self._lease.renew(sent, reply.lease)
            return True
        except (grpc.RpcError, ValueError) as error:  # the latter for a channel that was closed meanwhile
            log.debug("a heartbeat was not answered: %r", error)
            return False
        finally:
            self._beat_turn.release()

    def _next_heartbeat(self) -> pb.HeartbeatRequest:
        batch = self._outbox.next_batch()
        status = self._status()
        return pb.HeartbeatRequest(
            worker=self._worker,
            generation=encode_id(self._generation.id if self._generation else GenerationId(0, 0)),
            sequence=batch.sequence,
            step=status.step,
            phase=status.phase,
            events=batch.lines,
            pid=self._pid,
        )

    def _flush(self, deadline: Deadline) -> None:
        """Send what is queued, for as long as `deadline` allows."""
        while self._worker is not None and not self._outbox.is_empty():
            remaining = deadline()
            if remaining <= 0:
                return
            if not self._beat(remaining):
                self._closing.wait(min(self._timing.heartbeat_every, max(0.0, deadline())))

    # --- the follow thread

    def _keep_following(self) -> None:
        while not self._closing.is_set() and not self._ended:
            try:
                self._follow()
            except (grpc.RpcError, ValueError) as error:
                log.debug("the coordinator's directives broke off: %r", error)
                self._closing.wait(self._timing.heartbeat_every)

    def _follow(self) -> None:
        request = pb.FollowRequest(worker=self._worker)
        self._follow_call = self._stub.Follow(request, metadata=self._metadata, wait_for_ready=True)
        if self._closing.is_set():  # `close` came before there was a call that it could cancel
            self._follow_call.cancel()
        for directive in self._follow_call:
            self._heed(directive)

    def _heed(self, directive: pb.Directive) -> None:
        with self._changed:
            match directive.WhichOneof("what"):
                case "formed":
                    self._adopt(decode_generation(directive.formed))
                case "stop":
                    self._stop = directive.stop.reason
                case "regroup":
                    self._regroup(decode_id(directive.regroup.generation), directive.regroup.at_boundary)
                case "end":
                    self._failure = decode_failure(directive.end.failure)
                    self._ended = True
                    self._lease.end()
            is_over = self._ended or (self._generation is not None and self._over == self._generation.id)
            close = self._close_links if is_over else None
            self._changed.notify_all()
        if close is not None:
            close()

    def _adopt(self, generation: Generation) -> None:
        """Take a generation over that we belong to, unless it is older than ours: a late word of an earlier
        coordinator. One of the time before we came may have had another worker in our place."""
        is_ours = any(
            (member.worker, member.address) == (self._worker, self._address_on_ring) for member in generation.members
        )
        if is_ours and (self._generation is None or generation.id > self._generation.id):
            self._generation = generation
            self._close_links = None

    def _regroup(self, generation: GenerationId, at_boundary: bool) -> None:
        if at_boundary:
            self._break_at = generation
        else:
            self._over = generation

    # --- calls and threads

    def _call(self, method: Any, request: Any, timeout: float) -> Any:
        return method(request, timeout=timeout, metadata=self._metadata, wait_for_ready=True)

    def _start_thread(self, name: str, work: Callable[[], None]) -> None:
        # Daemons: a worker that fails before it can close its membership must still be able to exit.
        thread = threading.Thread(target=work, name=f"membership-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()


def _refused(failure: Failure) -> JobError:
    """The error that a refusal amounts to."""
    own_kinds = {kind.__name__: kind for kind in (DivergedError, FrameError)}
    return own_kinds[failure.kind](failure.message) if failure.kind in own_kinds else JobEnded(failure)


def _may_pass(error: Any) -> bool:
    return error.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
