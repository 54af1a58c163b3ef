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
from quorate.core.errors import DivergedError, FrameError, JobError, LeaseExpired, LinkError
from quorate.core.failure import Failure
from quorate.core.generation import Generation, GenerationId
from quorate.core.timing import Timing
from quorate.observe.event import Event
from quorate.wire.link import Deadline
from quorate.wire.proto import coordinator_pb2 as pb
from quorate.wire.proto.channel import open_channel, token_metadata, unanswered
from quorate.wire.proto.codec import decode_failure, decode_generation, encode_failure, encode_id
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
        self._generation: Generation | None = None
        self._stop: str | None = None
        self._ended = False
        self._failure: Failure | None = None
        self._end_callbacks: list[Callable[[], None]] = []
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
        self._start_thread("heartbeat", self._keep_beating)
        self._start_thread("follow", self._keep_following)
        return self._worker

    def await_generation(self, deadline: Deadline) -> Generation:
        """Wait until the coordinator has formed a generation; `deadline` tells how many seconds may still be waited."""
        with self._changed:
            while self._generation is None and not self._ended:
                # However patient the caller: a coordinator that is gone forms no generation.
                self.check_lease()
                remaining = deadline()
                if remaining <= 0:
                    raise LinkError(f"the coordinator at {self._address} has formed no generation in time")
                # A deadline that is a lease moves while we wait, so it is asked again.
                self._changed.wait(min(remaining, self._timing.heartbeat_every))
            if self._ended or self._generation is None:
                raise JobEnded(self._failure)
            return self._generation

    # --- acting

    def lease_remaining(self) -> float:
        """Seconds for which this worker may act; not positive when its lease, or the job, is over."""
        return self._lease.remaining()

    def check_lease(self) -> None:
        """Raise LeaseExpired, or JobEnded, when this worker may act no longer."""
        if self._ended:
            raise JobEnded(self._failure)
        if self._lease.remaining() <= 0:
            raise LeaseExpired(self._lease.explain(self._address))

    @property
    def stop_requested(self) -> str | None:
        """Why the job shall stop at the next step boundary, if it shall."""
        return self._stop

    @property
    def ended(self) -> bool:
        """Whether the coordinator has ended the job."""
        return self._ended

    def on_end(self, callback: Callable[[], None]) -> None:
        """Have `callback` called once when the coordinator ends the job: from the follow thread, or now if it has."""
        with self._changed:
            if not self._ended:
                self._end_callbacks.append(callback)
                return
        callback()

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

    def complete(self, digest: str, result: Mapping[str, Any]) -> None:
        """Tell that this worker is done, and wait until all are, with equal digests. Otherwise raises JobEnded."""
        assert self._worker is not None, "a worker registers before it completes"
        # The lease grows with every answer, so a long queue has its time as long as the coordinator takes it.
        self._flush(self.lease_remaining)
        request = pb.CompleteRequest(worker=self._worker, weights_digest=digest, result=json.dumps(dict(result)))
        failure = self._await_acknowledgement(request)
        if failure is not None:
            raise JobEnded(failure)

    def close(self) -> None:
        """Leave: sends nothing more, and ends the threads."""
        self._closing.set()
        if self._follow_call is not None:
            self._follow_call.cancel()
        self._channel.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _await_acknowledgement(self, request: pb.CompleteRequest) -> Failure | None:
        while True:
            try:
                reply = self._call(self._stub.Complete, request, self._timing.failure_timeout)
                return decode_failure(reply.failure)
            except grpc.RpcError as error:
                if not _may_pass(error):
                    raise unanswered(self._address, error) from None
            if self._ended:
                return self._failure
            self.check_lease()
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
        callbacks: list[Callable[[], None]] = []
        with self._changed:
            match directive.WhichOneof("what"):
                case "formed":
                    self._adopt(decode_generation(directive.formed))
                case "stop":
                    self._stop = directive.stop.reason
                case "end":
                    self._failure = decode_failure(directive.end.failure)
                    self._ended = True
                    self._lease.end()
                    callbacks, self._end_callbacks = self._end_callbacks, []
            self._changed.notify_all()
        for callback in callbacks:
            _call_back(callback)

    def _adopt(self, generation: Generation) -> None:
        """Take a generation over, unless it is older than the one we have: a late word of an earlier coordinator."""
        if self._generation is None or generation.id > self._generation.id:
            self._generation = generation

    # --- calls and threads

    def _call(self, method: Any, request: Any, timeout: float) -> Any:
        return method(request, timeout=timeout, metadata=self._metadata, wait_for_ready=True)

    def _start_thread(self, name: str, work: Callable[[], None]) -> None:
        # Daemons: a worker that fails before it can close its membership must still be able to exit.
        thread = threading.Thread(target=work, name=f"membership-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()


def _call_back(callback: Callable[[], None]) -> None:
    try:
        callback()
    except Exception:
        # One that fails must not keep the others from hearing of the end: somebody would wait for ever.
        log.exception("what was to be done at the end of the job has failed")


def _refused(failure: Failure) -> JobError:
    """The error that a refusal amounts to."""
    own_kinds = {kind.__name__: kind for kind in (DivergedError, FrameError)}
    return own_kinds[failure.kind](failure.message) if failure.kind in own_kinds else JobEnded(failure)


def _may_pass(error: Any) -> bool:
    return error.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
