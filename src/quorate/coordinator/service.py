"""The coordinator's gRPC service: turns calls into events, and carries out what `decide` answers.

Everything runs on one asyncio loop and no method awaits between reading the state and replacing it: no locks.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from quorate.coordinator.event_log import EventLog
from quorate.coordinator.events import (
    Action,
    Completed,
    DeclareGeneration,
    Dismiss,
    EndJob,
    ExitReported,
    FailureReported,
    GrantLease,
    HeartbeatReceived,
    MembershipEvent,
    Reading,
    Recall,
    Refuse,
    Registered,
    Regroup,
    RelaySave,
    RelayStop,
    ResizeRequested,
    SaveRequested,
    StateReported,
    StopRequested,
    Tick,
    Welcome,
)
from quorate.coordinator.membership import decide
from quorate.coordinator.places import news_of, wakes
from quorate.coordinator.states import Decision, Ended, JobSettings, Recalling, State, Training
from quorate.core.errors import RunError
from quorate.core.failure import Failure
from quorate.core.generation import GenerationId, WorkerStatus
from quorate.observe.events import LogMessage
from quorate.observe.jsonl import EventTail
from quorate.wire.proto import coordinator_pb2 as pb
from quorate.wire.proto.channel import (
    decode_cursor,
    decode_failure,
    decode_id,
    decode_pace,
    decode_position,
    encode_failure,
    encode_generation,
    encode_id,
)

log = logging.getLogger(__name__)
_TICKS_PER_TIMEOUT = 20
_EVENTS_EVERY = 0.05
"""Seconds between two looks at the event log, for whoever follows it."""
_EVENTS_AT_ONCE = 8 * 2**20
"""Bytes of it that go into one message."""
# What each kind makes obsolete.
_OBSOLETE = {"formed": ("formed", "regroup", "save"), "save": ("save",)}


class CoordinatorService:
    """One job's coordinator. Made and used on one asyncio loop."""

    def __init__(
        self,
        settings: JobSettings,
        event_log: EventLog,
        state: State,
        is_superseded: Callable[[], bool] = lambda: False,
    ) -> None:
        self._settings = settings
        self._event_log = event_log
        self._state = state
        self.is_superseded = is_superseded
        self._directives = Directives()
        self._changed = asyncio.Event()
        self.ended = asyncio.Event()
        self.outcome_fetched = asyncio.Event()
        # Set when another coordinator has taken this one's place: it decides nothing any more.
        self.superseded = asyncio.Event()
        if isinstance(self._state, Ended):
            self._directives.add(end_directive(self._state.failure))
            self.ended.set()

    @property
    def generation(self) -> str | None:
        """The generation that is at work, for the log."""
        return str(self._state.generation.id) if isinstance(self._state, Training) else None

    # --- the calls, in the order of the .proto file

    async def Register(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        """Give a worker its place, renew its lease, or hear where it stands."""
        decision = self.apply(event_of(request))
        return reply_to(request, decision.actions, self._settings.incarnation, time.time())

    # Which of the three it is shows the type of the request, here and in `decide`: reports.on_registered,
    # on_heartbeat and on_state_reported.
    Heartbeat = ReportState = Register

    async def Follow(self, request: pb.FollowRequest, context: Any) -> AsyncIterator[pb.Directive]:  # noqa: N802, ARG002
        """Tell all that was declared so far, and then what is declared, until the job ends."""
        told = 0
        while True:
            # Taken before looking: what is declared between looking and waiting must not be missed.
            changed = self._changed
            for number, directive in self._directives.after(told):
                told = number
                yield directive
                if directive.HasField("end"):
                    return
            await changed.wait()

    async def ReportFailure(self, request: pb.FailureReport, context: Any) -> pb.Ack:  # noqa: N802
        try:
            self.apply(event_of(request))
        except (ValueError, TypeError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the report is no failure: {error}")
        return pb.Ack()

    async def Complete(self, request: pb.CompleteRequest, context: Any) -> pb.CompleteReply:  # noqa: N802
        """Hear that a worker is done; answer when the job is."""
        try:
            self.apply(event_of(request))
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the result is not JSON: {error}")
        while not self.ended.is_set():
            changed = self._changed
            if isinstance(self._state, Recalling):
                # Its generation may go on: it is asked again once that is known.
                await context.abort(grpc.StatusCode.UNAVAILABLE, "not everybody has come back yet")
            if not isinstance(self._state, Training):
                return pb.CompleteReply(regroup=True)
            await changed.wait()
        assert isinstance(self._state, Ended)
        return pb.CompleteReply(failure=encode_failure(self._state.failure))

    async def ReportExit(self, request: pb.ExitReport, context: Any) -> pb.Ack:  # noqa: N802, ARG002
        by_signal = request.HasField("signal")
        reading = Reading(request.lane, request.epoch, tuple(request.samples), request.sample_count)
        self.apply(
            ExitReported(
                worker=request.slot,
                pid=request.pid,
                host=request.host,
                exit_code=None if by_signal else request.exit_code,
                signal=request.signal if by_signal else None,
                status=WorkerStatus(request.step if request.HasField("step") else None, request.phase),
                reading=reading if request.HasField("lane") else None,
            )
        )
        return pb.Ack()

    async def Stop(self, request: pb.StopRequest, context: Any) -> pb.Ack:  # noqa: N802, ARG002
        self.apply(StopRequested(request.reason))
        return pb.Ack()

    async def Resize(self, request: pb.ResizeRequest, context: Any) -> pb.ResizeReply:  # noqa: N802, ARG002
        if isinstance(self._state, Ended):
            return pb.ResizeReply(refusal=encode_failure(Failure("RequestError", "the job has ended.")))
        workers = request.workers if request.HasField("workers") else None
        servers = request.servers if request.HasField("servers") else None
        decision = self.apply(ResizeRequested(workers, servers, request.reason))
        refusal = next((action.failure for action in decision.actions if isinstance(action, Refuse)), None)
        return pb.ResizeReply(refusal=encode_failure(refusal))

    async def Save(self, request: pb.SaveRequest, context: Any) -> pb.SaveReply:  # noqa: N802, ARG002
        """Hear that a checkpoint is wanted; tell how far the job is known to be."""
        if isinstance(self._state, Ended):
            return pb.SaveReply(refusal=encode_failure(Failure("RequestError", "the job has ended.")))
        self.apply(SaveRequested(request.request))
        members = self._state.members
        # Whoever tells where it is names the step that it is in.
        reached = [(known.status.step or 0) - 1 for known in members.enrolled]
        return pb.SaveReply(step=max([members.cursor.step, *reached]))

    async def Outcome(self, request: pb.OutcomeRequest, context: Any) -> pb.OutcomeReply:  # noqa: N802, ARG002
        """Tell how the job ended; or what there is to do; or, after the given time, that there is nothing to tell."""
        processes = {(process.slot, process.pid) for process in request.processes}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(request.timeout):
                while not news_of(self._state, processes, time.monotonic()).is_new_to(request.workers):
                    await self._changed.wait()
        news = news_of(self._state, processes, time.monotonic())
        if news.outcome is not None:
            self.outcome_fetched.set()
            result = json.dumps(news.outcome.result)
            return pb.OutcomeReply(ended=True, failure=encode_failure(news.outcome.failure), result=result)
        return pb.OutcomeReply(
            ended=False,
            expelled=[pb.Process(slot=worker, pid=pid) for worker, pid in news.expelled],
            vacant=[pb.Vacancy(slot=slot, after=one.after, restore=one.restore) for slot, one in news.vacant.items()],
            workers=news.workers,
        )

    async def Events(self, request: pb.EventsRequest, context: Any) -> AsyncIterator[pb.EventsReply]:  # noqa: N802, ARG002
        """Tell what stands in the event log from a place on, and then what is written to it."""
        tail = EventTail(self._event_log.path)
        tail.offset = request.offset
        is_trouble_told = False
        while True:
            try:
                # Beside the loop: a disk that hangs must not keep heartbeats from being answered.
                lines = await asyncio.to_thread(tail.read_lines, _EVENTS_AT_ONCE)
                is_trouble_told = False
            except RunError as error:
                lines = [] if is_trouble_told else [LogMessage(message=error.message).to_json()]
                is_trouble_told = True
            if lines:
                yield pb.EventsReply(lines=lines, offset=tail.offset)
            elif request.follow:
                await asyncio.sleep(_EVENTS_EVERY)
            else:
                return

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:  # noqa: N802, ARG002
        """Tell who is there, and what each was last heard to be doing; changes nothing."""
        if isinstance(self._state, Ended):
            return pb.StatusReply()
        members, now = self._state.members, time.monotonic()
        workers = [
            pb.WorkerState(
                worker=known.worker,
                pid=known.registration.pid,
                host=known.registration.host,
                step=known.status.step or 0,
                phase=known.status.phase,
                waits_for=known.status.waits_for,
                silent_s=max(0.0, now - known.heard),
                leaving=known.is_leaving,
            )
            for known in members.enrolled
        ]
        return pb.StatusReply(workers=workers, wanted=members.wanted, wanted_servers=members.wanted_servers)

    # --- the loop around the pure function

    def apply(self, event: MembershipEvent) -> Decision:
        """Decide, and carry out what was decided; what is for one caller alone, its call answers."""
        decision = decide(self._state, event, time.monotonic())
        self._state = decision.state
        is_notable = wakes(event, decision)
        log.log(logging.INFO if is_notable else logging.DEBUG, "%s: %s", type(event).__name__, decision.reason)
        for action in decision.actions:
            self._event_log.record(action)
            if (directive := directive_of(action, self._settings.incarnation)) is not None:
                self._directives.add(directive)
        if isinstance(self._state, Ended):
            self.ended.set()
        if is_notable:
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
        return decision

    async def keep_time(self) -> None:
        """Tell the state that time passes, until the job ends or another coordinator has it."""
        while not self.superseded.is_set():
            await asyncio.sleep(self._settings.timing.failure_timeout / _TICKS_PER_TIMEOUT)
            if self.is_superseded():
                self.superseded.set()
            elif not self.ended.is_set():
                self.apply(Tick())


# --- what workers ask and are answered


def event_of(request: Any) -> MembershipEvent:
    """What a worker's request tells. Raises ValueError or TypeError where it makes no sense."""
    match request:
        case pb.RegisterRequest():
            return Registered(
                worker=request.slot,
                pid=request.pid,
                host=request.host,
                address=request.ring_address,
                local_address=request.local_address,
                facts=dict(request.facts),
                tensors={tensor.name: tensor.digest for tensor in request.tensors},
                cursor=decode_cursor(request.cursor),
                position=decode_position(request.position) if request.HasField("position") else None,
            )
        case pb.HeartbeatRequest():
            return HeartbeatReceived(
                worker=request.worker,
                generation=decode_id(request.generation),
                sequence=request.sequence,
                status=WorkerStatus(request.step, request.phase, request.moves, request.waits_for),
                events=tuple(request.events),
                pid=request.pid,
                is_leaving=request.leaving,
                pace=decode_pace(request.pace) if request.HasField("pace") else None,
            )
        case pb.StateReport():
            return StateReported(
                worker=request.worker,
                pid=request.pid,
                generation=decode_id(request.generation),
                cursor=decode_cursor(request.cursor),
                symptom=decode_failure(request.symptom),
                is_saved=request.saved,
                has_trained=request.has_trained,
            )
        case pb.FailureReport():
            failure = decode_failure(request.failure)
            if failure is None:
                raise ValueError("it is empty")
            worker = request.worker if request.HasField("worker") else None
            return FailureReported(worker, failure, request.pid, _generation_of(request))
        case pb.CompleteRequest():
            result = json.loads(request.result or "{}")
            return Completed(request.worker, request.weights_digest, result, request.pid, _generation_of(request))
    raise TypeError(f"{type(request).__name__} is no request of a worker's")


def reply_to(request: Any, actions: Sequence[Action], incarnation: int, time: float = 0.0) -> Any:
    """What a worker is answered that asked for this, and for which that was decided; `time` is when."""
    refusal = encode_failure(next((action.failure for action in actions if isinstance(action, Refuse)), None))
    is_recalled = any(isinstance(action, Recall) for action in actions)
    match request:
        case pb.RegisterRequest():
            lease = next((action.lease for action in actions if isinstance(action, Welcome)), 0.0)
            return pb.RegisterReply(
                worker=request.slot, incarnation=incarnation, lease=lease, refusal=refusal, time=time
            )
        case pb.HeartbeatRequest():
            granted = next((action.seconds for action in actions if isinstance(action, GrantLease)), 0.0)
            return pb.HeartbeatReply(lease=granted, unknown=is_recalled, incarnation=incarnation, time=time)
        case pb.StateReport():
            return pb.StateReply(refusal=refusal, unknown=is_recalled, incarnation=incarnation)
    return pb.Ack()


def _generation_of(request: Any) -> GenerationId | None:
    return decode_id(request.generation) if request.HasField("generation") else None


# --- directives to the workers


def directive_of(action: Action, incarnation: int) -> pb.Directive | None:
    """What a coordinator tells the workers for an action, if anything."""
    match action:
        case DeclareGeneration(generation):
            told = pb.Directive(formed=encode_generation(generation))
        case RelayStop(reason):
            told = pb.Directive(stop=pb.StopDirective(reason=reason))
        case RelaySave(generation, request):
            told = pb.Directive(save=pb.SaveDirective(generation=encode_id(generation), request=request))
        case Regroup(generation, at_boundary, saves):
            regroup = pb.RegroupDirective(generation=encode_id(generation), at_boundary=at_boundary, saves=saves)
            told = pb.Directive(regroup=regroup)
        case Dismiss(worker, pid):
            told = pb.Directive(dismiss=pb.DismissDirective(worker=worker, pid=pid, incarnation=incarnation))
        case EndJob(failure):
            told = end_directive(failure)
        case _:
            return None
    return told


def end_directive(failure: Failure | None) -> pb.Directive:
    """That the job is over, and why."""
    return pb.Directive(end=pb.EndDirective(failure=encode_failure(failure)))


class Directives:
    """Numbered in their order, for those who come later or come back.

    A generation makes those before it obsolete, and what was said of them: a job may have very many. So does a
    request for a checkpoint the requests before it.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[int, pb.Directive]] = []
        self._count = 0

    def add(self, directive: pb.Directive) -> None:
        """One more."""
        obsolete = _OBSOLETE.get(directive.WhichOneof("what") or "", ())
        self._kept = [one for one in self._kept if one[1].WhichOneof("what") not in obsolete]
        self._count += 1
        self._kept.append((self._count, directive))

    def after(self, number: int) -> list[tuple[int, pb.Directive]]:
        """Those that matter still, after the one of that number."""
        return [one for one in self._kept if one[0] > number]
