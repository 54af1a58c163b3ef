"""Who belongs to the job and how it goes on, as one pure function: `decide(state, event, now)`.

A lost worker costs a generation, not the job: the others report where they stand, and go on without it; another takes
its place. A broken link is a symptom: whoever meets one leaves its generation, and the next begins when the death or
the silence behind it is known, or when everybody has turned out to be alive. What user code raises ends the job.
"""

from dataclasses import replace
from typing import assert_never

from quorate.coordinator.autopsy import (
    autopsy_of_absence,
    autopsy_of_exit,
    autopsy_of_launcher,
    autopsy_of_silence,
    name_enrolled,
)
from quorate.coordinator.comparison import completion_difference, join_difference
from quorate.coordinator.forming import end, fill_place, form_if_ready, lose, regroup, vacate
from quorate.coordinator.records import (
    Action,
    Active,
    Completed,
    Crew,
    Decision,
    Ended,
    EndJob,
    Enrolled,
    ExitReported,
    FailureReported,
    Forming,
    GrantLease,
    HeartbeatReceived,
    LauncherGone,
    MembershipEvent,
    RecordEvents,
    RecordLoss,
    Refuse,
    Registered,
    Regroup,
    RelayStop,
    State,
    StateReported,
    StopRequested,
    Suspicion,
    Terms,
    Tick,
    Training,
    Warn,
    Welcome,
)
from quorate.coordinator.stall import Stall, at_place, find_stall
from quorate.core.errors import FrameError, LinkError
from quorate.core.failure import Failure
from quorate.core.generation import GenerationId


def start(terms: Terms, now: float) -> Forming:
    """The state of a coordinator that has just begun to serve."""
    return Forming(Crew(terms, ticked=now, awaited=frozenset(range(terms.workers))), since=now)


def decide(state: State, event: MembershipEvent, now: float) -> Decision:  # noqa: C901 (one case for each event)
    """What follows from an event: the next state, what to do, and why."""
    if isinstance(state, Ended):
        return _after_the_end(state, event)
    match event:
        case Registered():
            decision = _register(state, event, now)
        case HeartbeatReceived():
            decision = _hear(state, event, now)
        case StateReported():
            decision = _promise(state, event, now)
        case FailureReported():
            decision = _report(state, event)
        case ExitReported():
            decision = _exit(state, event, now)
        case Completed():
            decision = _complete(state, event)
        case StopRequested():
            decision = _stop(state, event)
        case LauncherGone():
            decision = _lose_launcher(state)
        case Tick():
            decision = _tick(state, now)
        case _:
            assert_never(event)
    return _remembering(decision, state)


def _remembering(decision: Decision, before: Active) -> Decision:
    """With what the workers have told so far, if this is the end: what comes later is written down once as well."""
    if not isinstance(decision.state, Ended):
        return decision
    heard = {known.worker: known.sequence for known in before.crew.enrolled}
    return replace(decision, state=replace(decision.state, heard=heard))


def _after_the_end(state: Ended, event: MembershipEvent) -> Decision:
    """One failure ends a job, and what comes later is a consequence. What workers still tell is written down."""
    if isinstance(event, Registered):
        failure = state.failure or Failure(FrameError.__name__, "the job is complete; it takes no more workers.")
        return Decision(state, (Refuse(event.worker, failure),), f"worker {event.worker} comes after the end")
    if isinstance(event, HeartbeatReceived) and event.events:
        return _hear_last_events(state, event)
    return Decision(state, (), "the job has ended")


def _hear_last_events(state: Ended, event: HeartbeatReceived) -> Decision:
    heard = state.heard.get(event.worker)
    if heard is None or event.sequence <= heard:
        return Decision(state, (), f"worker {event.worker} has told this before, or has never joined")
    later = replace(state, heard={**state.heard, event.worker: event.sequence})
    return Decision(later, (RecordEvents(event.events),), f"worker {event.worker} tells its last events")


# --- joining


def _register(state: Active, event: Registered, now: float) -> Decision:
    crew = state.crew
    if not 0 <= event.worker < crew.terms.workers:
        return _refuse(
            state, event, f"there is no place {event.worker}: the job has 0 to {crew.terms.workers - 1} (workers)."
        )
    known = crew.find(event.worker)
    if (event.worker, event.pid) in crew.expelled | crew.reaped:
        return _refuse(state, event, "it counts as lost, and its place is for another.")
    if known and known.registration.process != event.process:
        return _refuse(state, event, f"the place is taken: {name_enrolled(known)} has registered for it.")
    welcome = Welcome(event.worker, crew.terms.timing.lease)
    if known:
        again = replace(state, crew=_with(crew, replace(known, heard=now)))
        return Decision(again, (welcome,), f"worker {event.worker} has asked again")
    difference = join_difference(event, crew.reference) if crew.reference else None
    if difference:
        return end(difference, Refuse(event.worker, difference))
    crew = replace(
        crew,
        enrolled=(*crew.enrolled, Enrolled(event, heard=now, cursor=event.cursor)),
        reference=crew.reference or event,
        awaited=crew.awaited - {event.worker},
    )
    actions: tuple[Action, ...] = (welcome,)
    if isinstance(state, Training):
        # It is let in at a step boundary, where the others need not do anything again.
        actions = (welcome, Regroup(state.generation.id, at_boundary=True))
    count = f"{len(crew.enrolled)} of {crew.terms.workers}"
    return form_if_ready(replace(state, crew=crew), actions, f"worker {event.worker} has registered, {count}")


def _refuse(state: Active, event: Registered, why: str) -> Decision:
    message = f"worker {event.worker} (pid {event.pid} on host {event.host}) is refused: {why}"
    return Decision(state, (Refuse(event.worker, Failure(FrameError.__name__, message)),), message)


# --- living


def _hear(state: Active, event: HeartbeatReceived, now: float) -> Decision:
    known = state.crew.find(event.worker, event.pid)
    if known is None:
        reason = f"worker {event.worker} (pid {event.pid}) sends heartbeats but is no member: no lease"
        return Decision(state, (), reason)
    heard = replace(known, heard=now)
    actions: tuple[Action, ...] = (GrantLease(event.worker, state.crew.terms.timing.lease),)
    # A heartbeat that is sent again because its answer was lost has told its events already.
    if event.sequence > known.sequence:
        heard = at_place(replace(heard, sequence=event.sequence), event.place, now)
        actions = (*actions, RecordEvents(event.events)) if event.events else actions
    return Decision(replace(state, crew=_with(state.crew, heard)), actions, f"worker {event.worker} is alive")


def _promise(state: Active, event: StateReported, now: float) -> Decision:
    """A worker has left its generation, which is over with that for everybody."""
    known = state.crew.find(event.worker, event.pid)
    if known is None:
        message = f"worker {event.worker} (pid {event.pid}) counts as lost: another may have taken its place."
        return Decision(state, (Refuse(event.worker, Failure(FrameError.__name__, message)),), message)
    if known.is_ready or event.generation != _latest(state.crew):
        return Decision(state, (), f"worker {event.worker} tells where it stood in generation {event.generation}")
    has_trained = known.has_trained or event.cursor >= state.crew.cursor
    promised = replace(known, is_ready=True, cursor=event.cursor, has_trained=has_trained, heard=now)
    crew = _with(state.crew, promised)
    if event.symptom is not None:
        crew = replace(crew, suspicion=crew.suspicion or Suspicion(event.symptom, now))
    why = f" ({event.symptom.message})" if event.symptom else ""
    reason = f"worker {event.worker} stands at step {event.cursor.step}{why}"
    return form_if_ready(*regroup(replace(state, crew=crew), now), reason)


def _latest(crew: Crew) -> GenerationId:
    return GenerationId(crew.terms.incarnation, crew.generations)


def _with(crew: Crew, changed: Enrolled) -> Crew:
    return replace(
        crew, enrolled=tuple(changed if known.worker == changed.worker else known for known in crew.enrolled)
    )


def _stop(state: Active, event: StopRequested) -> Decision:
    if state.crew.stop is not None:
        return Decision(state, (), f"a stop is under way already ({state.crew.stop})")
    stopping = replace(state, crew=replace(state.crew, stop=event.reason))
    return form_if_ready(stopping, (RelayStop(event.reason),), f"stop at the next step boundary: {event.reason}")


def _lose_launcher(state: Active) -> Decision:
    """A launcher that has asked for a stop does not wait for workers that are still being built: nothing is lost."""
    stop = state.crew.stop
    if stop is None or isinstance(state, Training) or state.crew.has_state:
        return end(autopsy_of_launcher())
    result = {"ending": stop}
    return Decision(Ended(None, result), (EndJob(None, "", result),), f"stopped before the first step: {stop}")


def _complete(state: Active, event: Completed) -> Decision:
    if isinstance(state, Forming):
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
        return end(difference)
    first = in_order[0]
    reason = f"all workers are done with equal weights {first.digest}, {count}"
    return Decision(Ended(None, first.result), (EndJob(None, first.digest, first.result),), reason)


# --- failing


def _report(state: Active, event: FailureReported) -> Decision:
    known = state.crew.find(event.worker)
    failure = event.failure
    if failure.worker is None:
        failure = failure.at(worker=event.worker)
    if known and failure.step is None:
        failure = failure.at(step=known.place.step, phase=failure.phase or known.place.phase)
    if failure.kind not in _symptom_kinds():
        return end(failure)
    reason = f"worker {event.worker} gives up for a symptom; it is lost when it exits: {failure.message}"
    if known is None:
        return Decision(state, (), reason)
    return Decision(replace(state, crew=_with(state.crew, replace(known, last_words=failure.message))), (), reason)


def _symptom_kinds() -> set[str]:
    """Every kind of error between two processes: one of them is the trouble, and neither knows which."""
    kinds: list[type[LinkError]] = [LinkError]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
    return {kind.__name__ for kind in kinds}


def _exit(state: Active, event: ExitReported, now: float) -> Decision:
    crew, process = state.crew, (event.worker, event.pid)
    known = crew.find(event.worker, event.pid)
    failure = autopsy_of_exit(event, known)
    if known is not None:
        return lose(state, known, failure, _since_first_sign(crew, now), now, expel=False)
    is_awaited = event.worker in crew.awaited
    if process in crew.reaped:
        # The answer was lost: it is given again, and nobody is counted twice.
        reason = f"the end of worker {event.worker} (pid {event.pid}) is told again"
        return vacate(state, event.worker, (), reason) if is_awaited else Decision(state, (), reason)
    reaped = replace(state, crew=replace(crew, expelled=crew.expelled - {process}, reaped=crew.reaped | {process}))
    if process in crew.expelled:
        # Its loss has been told; now its place is free.
        return vacate(
            reaped, event.worker, (), f"worker {event.worker} (pid {event.pid}), which counted as lost, is gone"
        )
    if is_awaited:
        return fill_place(reaped, event.worker, failure, (RecordLoss(failure, 0.0),), is_vacant=True)
    return Decision(reaped, (), f"a process of worker {event.worker} (pid {event.pid}) has ended, which is no member")


def _since_first_sign(crew: Crew, now: float) -> float:
    return now - crew.suspicion.since if crew.suspicion else 0.0


# --- waiting


def _tick(state: Active, now: float) -> Decision:
    crew = state.crew
    timeout = crew.terms.timing.failure_timeout
    if now - crew.ticked > timeout / 2:
        return _forgive_silence(state, now)
    state = replace(state, crew=replace(crew, ticked=now))
    quietest = min(crew.enrolled, key=lambda known: known.heard, default=None)
    if quietest and now - quietest.heard >= timeout:
        failure = autopsy_of_silence(quietest, now, crew.terms)
        return lose(state, quietest, failure, now - quietest.heard, now, expel=True)
    if stall := find_stall(state.crew, now):
        return _act_on_stall(state, stall, now)
    return _give_up_forming(state, now)


def _forgive_silence(state: Active, now: float) -> Decision:
    """Nobody is lost by a pause of the coordinator itself (a suspended machine, a stopped process group)."""
    crew = state.crew
    heard = tuple(replace(known, heard=now, moved=now) for known in crew.enrolled)
    suspicion = crew.suspicion and replace(crew.suspicion, since=now)
    reason = f"the coordinator was held up for {now - crew.ticked:.1f} s; silence counts from now"
    return Decision(replace(state, crew=replace(crew, ticked=now, enrolled=heard, suspicion=suspicion)), (), reason)


def _act_on_stall(state: Active, stall: Stall, now: float) -> Decision:
    crew = state.crew
    step_timeout = crew.terms.step_timeout
    if step_timeout is not None:
        return lose(state, stall.culprit, stall.failure(step_timeout), stall.seconds, now, expel=True)
    if crew.slow_step == stall.step:
        return Decision(state, (), f"step {stall.step} still takes its time")
    message = f"{stall.message} It is waited for, since step_timeout is not set."
    told = replace(state, crew=replace(crew, slow_step=stall.step))
    return Decision(told, (Warn(message, stall.step),), message)


def _give_up_forming(state: Active, now: float) -> Decision:
    crew = state.crew
    terms = crew.terms
    is_short = len(crew.enrolled) < max(1, terms.min_workers) or not crew.has_state
    if isinstance(state, Forming) and crew.awaited and is_short and now - state.since >= terms.registration_limit:
        return end(autopsy_of_absence(sorted(crew.awaited), terms))
    return Decision(state, (), "nothing is overdue")
