"""The coordinator's gRPC service: turns calls into events, and carries out what `decide` answers.

Everything runs on one asyncio loop and no method awaits between reading the state and replacing it: no locks.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from quorate.coordinator.chronicle import Chronicle
from quorate.coordinator.membership import decide, start
from quorate.coordinator.records import (
    Action,
    Completed,
    Decision,
    DeclareGeneration,
    Ended,
    EndJob,
    ExitReported,
    Expel,
    FailureReported,
    GrantLease,
    HeartbeatReceived,
    LauncherGone,
    MembershipEvent,
    Place,
    RecordEvents,
    RecordLoss,
    Refill,
    Refuse,
    Registered,
    Regroup,
    RelayStop,
    State,
    StateReported,
    StopRequested,
    Terms,
    Tick,
    Training,
    Warn,
    Welcome,
)
from quorate.wire.proto import coordinator_pb2 as pb
from quorate.wire.proto.codec import (
    decode_cursor,
    decode_failure,
    decode_id,
    encode_failure,
    encode_generation,
    encode_id,
)
from quorate.wire.proto.coordinator_pb2_grpc import CoordinatorServicer

log = logging.getLogger(__name__)

_TICKS_PER_TIMEOUT = 20


class CoordinatorService(CoordinatorServicer):
    """One job's coordinator. Made and used on one asyncio loop."""

    def __init__(self, terms: Terms, chronicle: Chronicle, clock: Callable[[], float] = time.monotonic) -> None:
        self._terms = terms
        self._chronicle = chronicle
        self._clock = clock
        self._state: State = start(terms, clock())
        self._directives: list[pb.Directive] = []
        self._news = asyncio.Event()
        self.ended = asyncio.Event()
        self.outcome_fetched = asyncio.Event()

    # --- the calls, in the order of the .proto file

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterReply:  # noqa: N802, ARG002
        """Give a worker its place, or say why not."""
        decision = self.apply(_registered(request))
        reply = pb.RegisterReply(worker=request.slot)
        for action in decision.actions:
            if isinstance(action, Welcome):
                reply.lease = action.lease
            elif isinstance(action, Refuse):
                reply.refusal = encode_failure(action.failure)
        return reply

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatReply:  # noqa: N802, ARG002
        """Renew a worker's lease."""
        decision = self.apply(
            HeartbeatReceived(
                worker=request.worker,
                generation=decode_id(request.generation),
                sequence=request.sequence,
                place=Place(request.step, request.phase),
                events=tuple(request.events),
                pid=request.pid,
            )
        )
        granted = next((action.seconds for action in decision.actions if isinstance(action, GrantLease)), 0.0)
        return pb.HeartbeatReply(lease=granted)

    async def Follow(self, request: pb.FollowRequest, context: Any) -> AsyncIterator[pb.Directive]:  # noqa: N802, ARG002
        """Tell all that was declared so far, and then what is declared, until the job ends."""
        told = 0
        while True:
            # Taken before looking: what is declared between looking and waiting must not be missed.
            news = self._news
            for directive in self._directives[told:]:
                told += 1
                yield directive
                if directive.HasField("end"):
                    return
            if told == len(self._directives):
                await news.wait()

    async def ReportState(self, request: pb.StateReport, context: Any) -> pb.StateReply:  # noqa: N802, ARG002
        """Hear where a worker stands that has left its generation."""
        decision = self.apply(
            StateReported(
                worker=request.worker,
                pid=request.pid,
                generation=decode_id(request.generation),
                cursor=decode_cursor(request.cursor),
                symptom=decode_failure(request.symptom),
            )
        )
        refusal = next((action.failure for action in decision.actions if isinstance(action, Refuse)), None)
        return pb.StateReply(refusal=encode_failure(refusal))

    async def ReportFailure(self, request: pb.FailureReport, context: Any) -> pb.Ack:  # noqa: N802
        """Hear why a worker stops."""
        try:
            failure = decode_failure(request.failure)
        except (ValueError, TypeError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the report is no failure: {error}")
        if failure is not None:
            self.apply(FailureReported(request.worker if request.HasField("worker") else None, failure))
        return pb.Ack()

    async def Complete(self, request: pb.CompleteRequest, context: Any) -> pb.CompleteReply:  # noqa: N802
        """Hear that a worker is done; answer when the job is."""
        try:
            result = json.loads(request.result or "{}")
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the result is not JSON: {error}")
        generation = decode_id(request.generation) if request.HasField("generation") else None
        self.apply(Completed(request.worker, request.weights_digest, result, request.pid, generation))
        while not self.ended.is_set():
            news = self._news
            if not isinstance(self._state, Training):
                return pb.CompleteReply(regroup=True)
            await news.wait()
        return pb.CompleteReply(failure=encode_failure(self._outcome().failure))

    async def ReportExit(self, request: pb.ExitReport, context: Any) -> pb.ExitReply:  # noqa: N802, ARG002
        """Hear that a process is gone; say whether another shall take its place."""
        by_signal = request.HasField("signal")
        decision = self.apply(
            ExitReported(
                worker=request.slot,
                pid=request.pid,
                host=request.host,
                exit_code=None if by_signal else request.exit_code,
                signal=request.signal if by_signal else None,
                place=Place(request.step if request.HasField("step") else None, request.phase),
            )
        )
        for action in decision.actions:
            if isinstance(action, Refill):
                return pb.ExitReply(refill=True, after=action.after, restore=action.restore)
        return pb.ExitReply()

    async def Stop(self, request: pb.StopRequest, context: Any) -> pb.Ack:  # noqa: N802, ARG002
        """Hear that the job shall stop."""
        self.apply(StopRequested(request.reason))
        return pb.Ack()

    async def Outcome(self, request: pb.OutcomeRequest, context: Any) -> pb.OutcomeReply:  # noqa: N802, ARG002
        """Tell how the job ended; or whom to expel; or, after the given time, that there is nothing to tell."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(request.timeout):
                while not self.ended.is_set() and not self._expelled():
                    await self._news.wait()
        if not self.ended.is_set():
            return pb.OutcomeReply(ended=False, expelled=self._expelled())
        outcome = self._outcome()
        self.outcome_fetched.set()
        return pb.OutcomeReply(
            ended=True, failure=encode_failure(outcome.failure), result=json.dumps(dict(outcome.result))
        )

    # --- the loop around the pure function

    def apply(self, event: MembershipEvent) -> Decision:
        """Decide, and carry out what was decided."""
        decision = decide(self._state, event, self._clock())
        self._state = decision.state
        notable = any(not isinstance(action, GrantLease | RecordEvents) for action in decision.actions)
        log.log(logging.INFO if notable else logging.DEBUG, "%s: %s", type(event).__name__, decision.reason)
        for action in decision.actions:
            self._carry_out(action)
        return decision

    async def keep_time(self) -> None:
        """Tell the state that time passes, until the job ends."""
        while not self.ended.is_set():
            await asyncio.sleep(self._terms.timing.failure_timeout / _TICKS_PER_TIMEOUT)
            self.apply(Tick())

    def launcher_gone(self) -> None:
        """End the job because nobody looks after it any more."""
        self.apply(LauncherGone())

    def _carry_out(self, action: Action) -> None:
        match action:
            case DeclareGeneration(generation):
                self._chronicle.generation_formed(generation)
                self._declare(pb.Directive(formed=encode_generation(generation)))
            case RelayStop(reason):
                self._chronicle.stop_requested(reason)
                self._declare(pb.Directive(stop=pb.StopDirective(reason=reason)))
            case Regroup(generation, at_boundary):
                directive = pb.RegroupDirective(generation=encode_id(generation), at_boundary=at_boundary)
                self._declare(pb.Directive(regroup=directive))
            case RecordLoss(failure, detect):
                self._chronicle.worker_lost(failure, detect)
            case Warn(message, step):
                self._chronicle.warning(message, step)
            case Expel():
                self._tell_news()
            case RecordEvents(lines):
                self._chronicle.record(lines)
            case EndJob():
                self._end(action)
            case Welcome() | Refuse() | GrantLease() | Refill():
                pass  # the call that asked for it answers it

    def _end(self, action: EndJob) -> None:
        if action.failure is None:
            self._chronicle.job_finished(action.digest, dict(action.result))
        else:
            self._chronicle.job_failed(action.failure)
        self.ended.set()
        self._declare(pb.Directive(end=pb.EndDirective(failure=encode_failure(action.failure))))

    def _declare(self, directive: pb.Directive) -> None:
        self._directives.append(directive)
        self._tell_news()

    def _tell_news(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _expelled(self) -> list[pb.Expelled]:
        """Told until they have been reaped."""
        lost = () if isinstance(self._state, Ended) else sorted(self._state.crew.expelled)
        return [pb.Expelled(slot=worker, pid=pid) for worker, pid in lost]

    def _outcome(self) -> Ended:
        assert isinstance(self._state, Ended)
        return self._state


def _registered(request: pb.RegisterRequest) -> Registered:
    return Registered(
        worker=request.slot,
        pid=request.pid,
        host=request.host,
        address=request.ring_address,
        local_address=request.local_address,
        facts=dict(request.facts),
        tensors={tensor.name: tensor.digest for tensor in request.tensors},
        cursor=decode_cursor(request.cursor),
    )
