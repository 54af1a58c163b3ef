"""What workers report: that they are here, alive, out of their generation, or done."""

from collections.abc import Sequence
from dataclasses import replace

from quorate.coordinator.autopsy import name_enrolled, warning
from quorate.coordinator.events import (
    Action,
    Completed,
    EndJob,
    Expel,
    GrantLease,
    HeartbeatReceived,
    Recall,
    RecordEvents,
    Refuse,
    Registered,
    Regroup,
    StateReported,
    Welcome,
)
from quorate.coordinator.forming import end, form_if_ready, is_expected, regroup, take_back, without_missing
from quorate.coordinator.losses import condemn, give_up_state, proof_against
from quorate.coordinator.places import call_together, expel, mark_leaving, places
from quorate.coordinator.speed import find_better_sharing, judge
from quorate.coordinator.stall import with_status
from quorate.coordinator.states import Active, Decision, Ended, Enrolled, Members, Recalling, Suspicion, Training
from quorate.core.digests import first_difference, outvoted
from quorate.core.errors import DivergedError, FrameError, ReplicasDiffer, RequestError, StateLost
from quorate.core.failure import Failure
from quorate.core.generation import Role, name_of
from quorate.observe.events import LogMessage

CANARY = "canary"
_DATA = ("dataset", "dataset layout")
_LIBRARY = "library "
_NOT_GIVEN = "(not given)"


def on_registered(state: Active, event: Registered, now: float) -> Decision:
    """A process asks for a place, or comes back to it."""
    members = state.members
    why = _why_refused(state, event)
    if why:
        return _refuse(state, event, why)
    known = members.find(event.worker)
    welcome = Welcome(event.worker, members.settings.timing.lease)
    if known:
        again = replace(state, members=members.having(replace(known, heard=now)))
        return Decision(again, (welcome,), f"{name_of(event.worker)} has asked again")
    if event.position is not None:
        return _return(state, event, now)
    difference = join_difference(event, members.reference, _replica_of(event, members)) if members.reference else None
    if difference:
        return end(difference, Refuse(event.worker, difference))
    members = members.with_newcomer(Enrolled(event, heard=now, cursor=event.cursor, moved=now))
    joined: Active = replace(state, members=members)
    if isinstance(joined, Recalling):
        joined = replace(joined, missing=joined.missing - {(event.worker, event.pid)})
    # It is let in at a step boundary, where the others need not do anything again.
    actions = (welcome, *call_together(joined))
    count = f"{len(members.enrolled)} of {len(places(members))}"
    return form_if_ready(joined, actions, f"{name_of(event.worker)} has registered, {count}", now)


def _why_refused(state: Active, event: Registered) -> str:
    """Why a process cannot have the place that it asks for; empty if it can."""
    members = state.members
    # One whose place is no more may hold the state: it comes back, and leaves as it should.
    is_ours = members.find(event.worker, event.pid) is not None or is_expected(state, event.worker, event.pid)
    if event.worker not in places(members) and not is_ours:
        most = members.wanted + members.settings.spares - 1
        if not members.settings.servers:
            return f"there is no place {event.worker}: the job has 0 to {most} (workers)."
        return f"the job has workers 0 to {most}, and {members.wanted_servers} servers."
    if members.is_gone(event.worker, event.pid):
        return "it counts as lost and was replaced."
    known = members.find(event.worker)
    if known and known.registration.process != event.process:
        return f"the place is taken: {name_enrolled(known)} has registered for it."
    return ""


def _return(state: Active, event: Registered, now: float) -> Decision:
    """A worker of the coordinator before this one comes back."""
    if not is_expected(state, event.worker, event.pid):
        return _refuse(state, event, "nobody waits for it: it was replaced.")
    position = event.position
    if state.members.is_condemned and position and position.generation:
        return _turn_away(state, event, now)
    welcome = Welcome(event.worker, state.members.settings.timing.lease)
    back = take_back(state, event, now)
    actions: tuple[Action, ...] = (welcome, *call_together(back))
    if not isinstance(back, Recalling) and position and position.generation and not position.has_left:
        # The others have gone on without it.
        actions = (*actions, Regroup(position.generation.id, at_boundary=False))
    return form_if_ready(back, actions, f"{name_of(event.worker)} has come back", now)


def _turn_away(state: Active, event: Registered, now: float) -> Decision:
    """One that has trained in a generation whose replicas differed: the coordinator before could not have it killed."""
    process = (event.worker, event.pid)
    gone: Active = replace(state, members=expel(state.members, {process}))
    if isinstance(gone, Recalling):
        gone = without_missing(gone, process)
    refusal = _refuse(gone, event, "the replicas of its generation differed.")
    return form_if_ready(gone, (*refusal.actions, Expel(*process)), refusal.reason, now)


def _refuse(state: Active, event: Registered, why: str) -> Decision:
    message = f"{name_of(event.worker)} (pid {event.pid} on host {event.host}) is refused: {why}"
    return Decision(state, (Refuse(event.worker, Failure(FrameError.__name__, message)),), message)


def on_heartbeat(state: Active, event: HeartbeatReceived, now: float) -> Decision:
    """A member is alive; its lease is renewed, and what it tells is written down once."""
    known = state.members.find(event.worker, event.pid)
    if is_expected(state, event.worker, event.pid):
        return _recall(state, event.worker)
    if known is None:
        reason = f"{name_of(event.worker)} (pid {event.pid}) sends heartbeats but is not a member: no lease"
        return Decision(state, (), reason)
    heard = replace(known, heard=now)
    actions: tuple[Action, ...] = (GrantLease(event.worker, state.members.settings.timing.lease),)
    # A heartbeat that is sent again because its answer was lost has told its events already.
    if event.sequence > known.sequence:
        heard = replace(heard, sequence=event.sequence)
        actions = (*actions, RecordEvents(event.events)) if event.events else actions
    members = state.members.having(heard)
    if event.sequence > known.sequence:
        members = with_status(members, heard, event.status, now, is_over=not isinstance(state, Training))
        heard = members.find(event.worker, event.pid) or heard
    alive: Active = replace(state, members=members)
    reason = f"{name_of(event.worker)} is alive"
    if isinstance(alive, Training) and heard.within == alive.generation.id and event.sequence > known.sequence:
        alive, told, why = _judge_pace(alive, heard, event, now)
        actions, reason = (*actions, *told), "; ".join((reason, *why))
    if event.is_leaving and not known.is_leaving:
        return _let_go(alive, known, actions, now)
    return Decision(alive, actions, reason)


def _judge_pace(
    state: Training, known: Enrolled, event: HeartbeatReceived, now: float
) -> tuple[Training, tuple[Action, ...], list[str]]:
    """Somebody may be much slower than the others, and lanes may be better off elsewhere; why, in sentences."""
    if event.pace is None:
        return state, (), []
    step = event.status.step or 0
    settings = state.members.settings
    hosted = state.generation.members[state.generation.position(known.worker)].lanes
    if settings.mesh is not None:
        hosted = settings.mesh.lanes_of(known.worker, settings.lanes)
    if not hosted:
        return state, (), []
    judged, trouble = judge(state.members, known, hosted, event.pace)
    state = replace(state, members=state.members.having(judged))
    actions: tuple[Action, ...] = (warning(trouble, step, now),) if trouble else ()
    if better := find_better_sharing(state, step, now):
        actions = (
            *actions,
            LogMessage(step=step, time=now, level="info", message=better),
            Regroup(state.generation.id, at_boundary=True),
        )
        state = replace(state, is_called=True)
    return state, actions, [sentence for sentence in (trouble, better) if sentence]


def _let_go(state: Active, known: Enrolled, actions: tuple[Action, ...], now: float) -> Decision:
    """A worker has to leave: it completes its step, and the others go on without it."""
    leaving: Active = replace(state, members=mark_leaving(state.members, {known.worker}))
    reason = f"{name_enrolled(known)} has been asked to leave"
    told = warning(f"{reason}.", known.status.step or 0, now)
    return form_if_ready(leaving, (*actions, told, *call_together(leaving)), reason, now)


def on_state_reported(state: Active, event: StateReported, now: float) -> Decision:
    """A worker has left its generation. If that is the one at work, it is over for everybody."""
    known = state.members.find(event.worker, event.pid)
    if is_expected(state, event.worker, event.pid):
        return _recall(state, event.worker)
    if known is None:
        message = f"{name_of(event.worker)} (pid {event.pid}) counts as lost: another may have taken its place."
        return Decision(state, (Refuse(event.worker, Failure(FrameError.__name__, message)),), message)
    if event.generation != known.within:
        return Decision(state, (), f"{name_of(event.worker)} reports where it was in generation {event.generation}")
    has_trained = known.has_trained or event.cursor >= state.members.cursor
    if state.members.settings.mesh is not None:
        has_trained = event.has_trained  # who was to go back to a checkpoint may not have done so
    promised = replace(
        known,
        within=None,
        cursor=event.cursor,
        has_trained=has_trained,
        is_saved=event.is_saved,
        # A step was completed, so that everything was taken over before it.
        has_retired=known.is_retiring and event.cursor > state.members.cursor,
        heard=now,
    )
    members = state.members.having(promised)
    if members.settings.mesh is not None and has_trained and event.cursor != members.cursor:
        # The job has gone on from what they have found, and may have saved since.
        members = replace(members, founders=members.founders & members.awaited)
    if event.cursor > members.cursor and event.worker in members.given_up:
        # It has completed a step, so that its place lacks nothing.
        members = replace(
            members, given_up={worker: n for worker, n in members.given_up.items() if worker != event.worker}
        )
    if event.symptom is not None and not members.is_explained:
        before = members.suspicion or Suspicion((), now)
        symptoms = (*before.symptoms, event.symptom.at(worker=event.worker))
        members = replace(members, suspicion=replace(before, symptoms=symptoms))
    why = f" ({event.symptom.message})" if event.symptom else ""
    reason = f"{name_of(event.worker)} stands at step {event.cursor.step}{why}"
    left: Active = replace(state, members=members)
    if hopeless := _find_hopeless(left, event, now):
        return hopeless
    if isinstance(left, Training) and event.generation != left.generation.id:
        return Decision(left, call_together(left), reason)
    return form_if_ready(*regroup(left, now), reason, now)


def _find_hopeless(state: Active, event: StateReported, now: float) -> Decision | None:
    """Whether what members hold is no use any more, as this report shows."""
    members = state.members
    if members.accused is not None and (proof := proof_against(members.accused, members)):
        return condemn(state, proof, now)
    if event.symptom is not None and event.symptom.kind == StateLost.__name__:
        return give_up_state(state, event.symptom, now)
    return None


def _recall(state: Active, worker: int) -> Decision:
    return Decision(state, (Recall(worker),), f"{name_of(worker)} is to report its position to a new coordinator")


def on_completed(state: Active, event: Completed, now: float) -> Decision:
    """A member is done; the job is, when all are, with equal digests."""
    if not isinstance(state, Training):
        return Decision(state, (), f"{name_of(event.worker)} is done, but its generation is over: ignored")
    if event.generation not in (None, state.generation.id):
        # A stop may have led the job further since then, and the digest would be another.
        return Decision(state, (), f"{name_of(event.worker)} was done in generation {event.generation}: ignored")
    known = state.members.find(event.worker, event.pid)
    if known is None or event.worker not in {member.worker for member in state.generation.members}:
        return Decision(state, (), f"{name_of(event.worker)} is done but is not a member: ignored")
    completed = (*(done for done in state.completed if done.worker != event.worker), event)
    count = f"{len(completed)} of {len(state.generation.members)}"
    if len(completed) < len(state.generation.members):
        return Decision(replace(state, completed=completed), (), f"{name_of(event.worker)} is done, {count}")
    in_order = sorted(completed, key=lambda done: state.generation.position(done.worker))
    # What servers hold is in what workers have pulled.
    difference = completion_difference([done for done in in_order if Role.of(done.worker) is Role.WORKER])
    if difference:
        return condemn(state, difference, now)
    first = in_order[0]
    reason = f"all workers are done with equal weights {first.digest}, {count}"
    return Decision(Ended(None, first.result), (EndJob(None, first.digest, first.result),), reason)


# --- what must be equal in all workers: facts and state when they join, weights when they are done


def join_difference(newcomer: Registered, first: Registered, replica: Registered | None) -> Failure | None:
    """Why a newcomer cannot compute the same bits as the first worker, if so; `replica` is one that holds the same."""
    message = _fact_difference(newcomer, first)
    if message is None and replica is not None:
        message = _tensor_difference(newcomer, replica)
    if message is None:
        return None
    # Before the first step nothing is lost yet: the task, or the request, is wrong.
    exit_code = RequestError.exit_code if first.cursor.step == 0 else DivergedError.exit_code
    return Failure(DivergedError.__name__, message, worker=newcomer.worker, exit_code=exit_code)


def _replica_of(newcomer: Registered, members: Members) -> Registered | None:
    """With what a newcomer's state is compared: the first worker's, or that of one with the same part."""
    if members.settings.mesh is None:
        return members.reference
    part = members.settings.part(newcomer.worker)
    others = (known for known in members.enrolled if members.settings.part(known.worker) == part)
    return next((known.registration for known in others), None)


def completion_difference(completed: Sequence[Completed]) -> Failure | None:
    """Which workers ended with other weights than most, if any did."""
    found = outvoted({done.worker: done.digest for done in completed})
    if found is None:
        return None
    digests = ", ".join(f"{name_of(done.worker)} has {done.digest}" for done in completed)
    return Failure(
        ReplicasDiffer.__name__,
        f"the workers ended with different weights: {digests}.",
        culprits=found[1],
    )


def _fact_difference(newcomer: Registered, first: Registered) -> str | None:
    names = {*newcomer.facts, *first.facts}
    # The canary last, and data before it: other libraries sing and decode otherwise, and the library is what a person
    # can change.
    for name in sorted(names, key=lambda name: (name == CANARY, name in _DATA, name)):
        mine, theirs = newcomer.facts.get(name, _NOT_GIVEN), first.facts.get(name, _NOT_GIVEN)
        # A library that decodes samples is given where it is loaded, and need not be used.
        if mine != theirs and not (name.startswith(_LIBRARY) and _NOT_GIVEN in (mine, theirs)):
            return _described(name, mine, theirs, newcomer, first)
    return None


def _described(fact: str, mine: str, theirs: str, newcomer: Registered, first: Registered) -> str:
    where = f" (hosts {newcomer.host} and {first.host})" if newcomer.host != first.host else ""
    if fact in _DATA:
        # One that was started again is compared with what it was before.
        whose = "it did before" if newcomer.worker == first.worker else f"{name_of(first.worker)}"
        return (
            f"{name_of(newcomer.worker)} reads other data than {whose} ({fact} {mine}, not {theirs}): all "
            f"workers of a job need the same{where}. Give all of them the same files, the same index of shards and the "
            "same datasets() (its length, columns=, window=); what was changed while the job ran has to be restored "
            "before it is resumed."
        )
    meaning = "the machines do not compute alike" if fact == CANARY else f"all workers of a job need the same{where}"
    return f"{name_of(newcomer.worker)}'s {fact} {mine} differs from {name_of(first.worker)}'s {theirs}: {meaning}."


def _tensor_difference(newcomer: Registered, first: Registered) -> str | None:
    if newcomer.cursor != first.cursor:
        return None  # who is behind copies the state of who is ahead
    tensor = first_difference(dict(newcomer.tensors), dict(first.tensors))
    if tensor is None:
        return None
    if first.cursor.step > 0:
        return (
            f"{name_of(newcomer.worker)} holds another state than {name_of(first.worker)} at step {first.cursor.step}:"
            f" they first differ in '{tensor}'. They read other checkpoints, or one of them is damaged."
        )
    return (
        f"{name_of(newcomer.worker)} built other initial weights than {name_of(first.worker)}: they first differ in"
        f" '{tensor}'. The model is built without a fixed seed: draw from the global generators of torch, NumPy and"
        " Python, which are seeded before `model()` is called, and not from the time or a generator of your own."
    )
