"""What members tell: that they are alive, where they stand, that they are done."""

from dataclasses import replace

from quorate.coordinator.actions import Action, EndJob, GrantLease, Inform, Recall, RecordEvents, Refuse, Regroup, Warn
from quorate.coordinator.autopsy import name_enrolled
from quorate.coordinator.balance import find_better_sharing
from quorate.coordinator.comparison import completion_difference
from quorate.coordinator.decision import Decision
from quorate.coordinator.events import Completed, HeartbeatReceived, StateReported
from quorate.coordinator.forming import condemn, form_if_ready, proof_against, regroup
from quorate.coordinator.places import call_together, mark_leaving
from quorate.coordinator.stall import at_place
from quorate.coordinator.states import Active, Ended, Enrolled, Suspicion, Training
from quorate.coordinator.stragglers import judge
from quorate.coordinator.succession import is_expected
from quorate.core.errors import FrameError
from quorate.core.failure import Failure


def hear(state: Active, event: HeartbeatReceived, now: float) -> Decision:
    """A member is alive; its lease is renewed, and what it tells is written down once."""
    known = state.crew.find(event.worker, event.pid)
    if is_expected(state, event.worker, event.pid):
        return _recall(state, event.worker)
    if known is None:
        reason = f"worker {event.worker} (pid {event.pid}) sends heartbeats but is no member: no lease"
        return Decision(state, (), reason)
    heard = replace(known, heard=now)
    actions: tuple[Action, ...] = (GrantLease(event.worker, state.crew.terms.timing.lease),)
    # A heartbeat that is sent again because its answer was lost has told its events already.
    if event.sequence > known.sequence:
        heard = replace(heard, sequence=event.sequence)
        actions = (*actions, RecordEvents(event.events)) if event.events else actions
    crew = state.crew.having(heard)
    if event.sequence > known.sequence:
        crew = at_place(crew, heard, event.place, now, is_over=not isinstance(state, Training))
        heard = crew.find(event.worker, event.pid) or heard
    alive: Active = replace(state, crew=crew)
    reason = f"worker {event.worker} is alive"
    if isinstance(alive, Training) and heard.within == alive.generation.id and event.sequence > known.sequence:
        alive, told, why = _hear_pace(alive, heard, event, now)
        actions, reason = (*actions, *told), "; ".join((reason, *why))
    if event.is_leaving and not known.is_leaving:
        return _let_go(alive, known, actions, now)
    return Decision(alive, actions, reason)


def _hear_pace(
    state: Training, known: Enrolled, event: HeartbeatReceived, now: float
) -> tuple[Training, tuple[Action, ...], list[str]]:
    """Somebody may be much slower than the others, and lanes may be better off elsewhere; why, in sentences."""
    if event.pace is None:
        return state, (), []
    step = event.place.step or 0
    hosted = state.generation.members[state.generation.position(known.worker)].lanes
    judged, trouble = judge(state.crew, known, hosted, event.pace)
    state = replace(state, crew=state.crew.having(judged))
    actions: tuple[Action, ...] = (Warn(trouble, step),) if trouble else ()
    if better := find_better_sharing(state, step, now):
        actions = (*actions, Inform(better, step), Regroup(state.generation.id, at_boundary=True))
        state = replace(state, is_called=True)
    return state, actions, [sentence for sentence in (trouble, better) if sentence]


def _let_go(state: Active, known: Enrolled, actions: tuple[Action, ...], now: float) -> Decision:
    """A worker has to leave: it completes its step, and the others go on without it."""
    leaving: Active = replace(state, crew=mark_leaving(state.crew, {known.worker}))
    reason = f"{name_enrolled(known)} has been asked to leave"
    return form_if_ready(
        leaving, (*actions, Warn(f"{reason}.", known.place.step or 0), *call_together(leaving)), reason, now
    )


def promise(state: Active, event: StateReported, now: float) -> Decision:
    """A worker has left its generation. If that is the one at work, it is over for everybody."""
    known = state.crew.find(event.worker, event.pid)
    if is_expected(state, event.worker, event.pid):
        return _recall(state, event.worker)
    if known is None:
        message = f"worker {event.worker} (pid {event.pid}) counts as lost: another may have taken its place."
        return Decision(state, (Refuse(event.worker, Failure(FrameError.__name__, message)),), message)
    if event.generation != known.within:
        return Decision(state, (), f"worker {event.worker} tells where it stood in generation {event.generation}")
    has_trained = known.has_trained or event.cursor >= state.crew.cursor
    promised = replace(
        known, within=None, cursor=event.cursor, has_trained=has_trained, is_saved=event.is_saved, heard=now
    )
    crew = state.crew.having(promised)
    if event.cursor > crew.cursor and event.worker in crew.given_up:
        # It has completed a step, so that its place lacks nothing.
        crew = replace(crew, given_up={worker: n for worker, n in crew.given_up.items() if worker != event.worker})
    if event.symptom is not None and not crew.is_explained:
        crew = replace(crew, suspicion=_suspect(crew.suspicion, event.symptom.at(worker=event.worker), now))
    why = f" ({event.symptom.message})" if event.symptom else ""
    reason = f"worker {event.worker} stands at step {event.cursor.step}{why}"
    left: Active = replace(state, crew=crew)
    if proof := proof_against(crew):
        return condemn(left, proof, now)
    if isinstance(left, Training) and event.generation != left.generation.id:
        return Decision(left, call_together(left), reason)
    return form_if_ready(*regroup(left, now), reason, now)


def _recall(state: Active, worker: int) -> Decision:
    return Decision(state, (Recall(worker),), f"worker {worker} is to tell a new coordinator where it stands")


def _suspect(before: Suspicion | None, symptom: Failure, now: float) -> Suspicion:
    return Suspicion((*before.symptoms, symptom), before.since) if before else Suspicion((symptom,), now)


def complete(state: Active, event: Completed, now: float) -> Decision:
    """A member is done; the job is, when all are, with equal digests."""
    if not isinstance(state, Training):
        return Decision(state, (), f"worker {event.worker} is done, but its generation is over: ignored")
    if event.generation not in (None, state.generation.id):
        # A stop may have led the job further since then, and the digest would be another.
        return Decision(state, (), f"worker {event.worker} was done in generation {event.generation}: ignored")
    known = state.crew.find(event.worker, event.pid)
    if known is None or event.worker not in {member.worker for member in state.generation.members}:
        return Decision(state, (), f"worker {event.worker} is done but is no member: ignored")
    completed = (*(done for done in state.completed if done.worker != event.worker), event)
    count = f"{len(completed)} of {len(state.generation.members)}"
    if len(completed) < len(state.generation.members):
        return Decision(replace(state, completed=completed), (), f"worker {event.worker} is done, {count}")
    in_order = sorted(completed, key=lambda done: state.generation.position(done.worker))
    difference = completion_difference(in_order)
    if difference:
        return condemn(state, difference, now)
    first = in_order[0]
    reason = f"all workers are done with equal weights {first.digest}, {count}"
    return Decision(Ended(None, first.result), (EndJob(None, first.digest, first.result),), reason)
