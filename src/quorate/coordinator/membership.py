"""Who belongs to the job and how it goes on, as one pure function: `decide(state, event, now)`.

A lost worker costs a generation, not the job: the others report where they stand, and go on without it; another takes
its place. A broken link is a symptom: whoever meets one leaves its generation, and the next begins when the death or
the silence behind it is known, or when everybody has turned out to be alive. A link that fails twice like that is
avoided (weak_links.py). What user code raises ends the job.
"""

from dataclasses import replace
from typing import assert_never

from quorate.coordinator.autopsy import (
    autopsy_of_absence,
    autopsy_of_exit,
    autopsy_of_launcher,
    autopsy_of_no_return,
    autopsy_of_silence,
    name_enrolled,
)
from quorate.coordinator.balance import find_better_sharing
from quorate.coordinator.comparison import completion_difference, join_difference
from quorate.coordinator.forming import end, fill_place, form_if_ready, lose, regroup, vacate
from quorate.coordinator.places import call_together, mark_leaving, places, resized
from quorate.coordinator.poison import with_victim
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
    Expel,
    FailureReported,
    Forming,
    GrantLease,
    HeartbeatReceived,
    Inform,
    LauncherGone,
    MembershipEvent,
    Recall,
    Recalling,
    RecordEvents,
    RecordLoss,
    RecordResize,
    Refuse,
    Registered,
    Regroup,
    RelayStop,
    ResizeRequested,
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
from quorate.coordinator.stragglers import judge
from quorate.coordinator.succession import take_back
from quorate.coordinator.weak_links import who_may_return
from quorate.core.errors import FrameError, LinkError
from quorate.core.exit_codes import LEFT
from quorate.core.failure import Failure


def start(terms: Terms, now: float) -> Forming:
    """The state of a coordinator that has just begun to serve."""
    everybody = frozenset(range(terms.workers + terms.spares))
    return Forming(Crew(terms, ticked=now, wanted=terms.workers, awaited=everybody), since=now)


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
            decision = _stop(state, event, now)
        case ResizeRequested():
            decision = _resize(state, event, now)
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
    why = _why_refused(state, event)
    if why:
        return _refuse(state, event, why)
    known = crew.find(event.worker)
    welcome = Welcome(event.worker, crew.terms.timing.lease)
    if known:
        again = replace(state, crew=_with(crew, replace(known, heard=now)))
        return Decision(again, (welcome,), f"worker {event.worker} has asked again")
    if event.position is not None:
        return _return(state, event, now)
    difference = join_difference(event, crew.reference) if crew.reference else None
    if difference:
        return end(difference, Refuse(event.worker, difference))
    crew = replace(
        crew,
        enrolled=(*crew.enrolled, Enrolled(event, heard=now, cursor=event.cursor)),
        reference=crew.reference or event,
        awaited=crew.awaited - {event.worker},
    )
    joined: Active = replace(state, crew=crew)
    if isinstance(joined, Recalling):
        joined = replace(joined, missing=joined.missing - {(event.worker, event.pid)})
    # It is let in at a step boundary, where the others need not do anything again.
    actions = (welcome, *call_together(joined))
    count = f"{len(crew.enrolled)} of {len(places(crew))}"
    return form_if_ready(joined, actions, f"worker {event.worker} has registered, {count}", now)


def _why_refused(state: Active, event: Registered) -> str:
    """Why a process cannot have the place that it asks for; empty if it can."""
    crew = state.crew
    # One whose place is no more may hold the state: it comes back, and leaves as it should.
    is_ours = crew.find(event.worker, event.pid) is not None or _is_expected(state, event.worker, event.pid)
    if event.worker not in places(crew) and not is_ours:
        return f"there is no place {event.worker}: the job has 0 to {len(places(crew)) - 1} (workers)."
    if (event.worker, event.pid) in crew.expelled | crew.reaped | crew.dismissed:
        return "it counts as lost, and its place is for another."
    known = crew.find(event.worker)
    if known and known.registration.process != event.process:
        return f"the place is taken: {name_enrolled(known)} has registered for it."
    return ""


def _return(state: Active, event: Registered, now: float) -> Decision:
    """A worker of the coordinator before this one comes back."""
    if not _is_expected(state, event.worker, event.pid):
        return _refuse(state, event, "nobody waits for it: it was given up, and its place is for another.")
    welcome = Welcome(event.worker, state.crew.terms.timing.lease)
    back = take_back(state, event, now)
    actions = (welcome, *call_together(back))
    return form_if_ready(back, actions, f"worker {event.worker} has come back", now)


def _refuse(state: Active, event: Registered, why: str) -> Decision:
    message = f"worker {event.worker} (pid {event.pid} on host {event.host}) is refused: {why}"
    return Decision(state, (Refuse(event.worker, Failure(FrameError.__name__, message)),), message)


# --- living


def _hear(state: Active, event: HeartbeatReceived, now: float) -> Decision:
    known = state.crew.find(event.worker, event.pid)
    if _is_expected(state, event.worker, event.pid):
        return _recall(state, event.worker)
    if known is None:
        reason = f"worker {event.worker} (pid {event.pid}) sends heartbeats but is no member: no lease"
        return Decision(state, (), reason)
    heard = replace(known, heard=now)
    actions: tuple[Action, ...] = (GrantLease(event.worker, state.crew.terms.timing.lease),)
    # A heartbeat that is sent again because its answer was lost has told its events already.
    if event.sequence > known.sequence:
        heard = at_place(replace(heard, sequence=event.sequence), event.place, now)
        actions = (*actions, RecordEvents(event.events)) if event.events else actions
    alive: Active = replace(state, crew=_with(state.crew, heard))
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
    state = replace(state, crew=_with(state.crew, judged))
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


def _promise(state: Active, event: StateReported, now: float) -> Decision:
    """A worker has left its generation. If that is the one at work, it is over for everybody."""
    known = state.crew.find(event.worker, event.pid)
    if _is_expected(state, event.worker, event.pid):
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
    crew = _with(state.crew, promised)
    if event.is_saved:
        crew = replace(crew, saved=max(crew.saved, event.cursor))
    if event.symptom is not None and not crew.is_explained:
        crew = replace(crew, suspicion=_suspect(crew.suspicion, event.symptom.at(worker=event.worker), now))
    why = f" ({event.symptom.message})" if event.symptom else ""
    reason = f"worker {event.worker} stands at step {event.cursor.step}{why}"
    left: Active = replace(state, crew=crew)
    if isinstance(left, Training) and event.generation != left.generation.id:
        return Decision(left, call_together(left), reason)
    return form_if_ready(*regroup(left, now), reason, now)


def _is_expected(state: Active, worker: int, pid: int) -> bool:
    """Whether a process that is not known was known, or may have been, to the coordinator before this one."""
    if not state.crew.is_successor or state.crew.find(worker) is not None:
        return False
    is_missing = isinstance(state, Recalling) and (worker, pid) in state.missing
    is_gone = (worker, pid) in state.crew.reaped | state.crew.expelled | state.crew.dismissed
    return is_missing or (worker in state.crew.awaited and not is_gone)


def _recall(state: Active, worker: int) -> Decision:
    return Decision(state, (Recall(worker),), f"worker {worker} is to tell a new coordinator where it stands")


def _suspect(before: Suspicion | None, symptom: Failure, now: float) -> Suspicion:
    return Suspicion((*before.symptoms, symptom), before.since) if before else Suspicion((symptom,), now)


def _with(crew: Crew, changed: Enrolled) -> Crew:
    return replace(
        crew, enrolled=tuple(changed if known.worker == changed.worker else known for known in crew.enrolled)
    )


def _stop(state: Active, event: StopRequested, now: float) -> Decision:
    if state.crew.stop is not None:
        return Decision(state, (), f"a stop is under way already ({state.crew.stop})")
    stopping = replace(state, crew=replace(state.crew, stop=event.reason))
    return form_if_ready(stopping, (RelayStop(event.reason),), f"stop at the next step boundary: {event.reason}", now)


def _resize(state: Active, event: ResizeRequested, now: float) -> Decision:
    crew = state.crew
    workers = event.workers
    why = _why_not_resized(crew, workers)
    if why:
        message = f"the job cannot have {workers} workers: {why}"
        return Decision(state, (Refuse(None, Failure("RequestError", message)),), message)
    if workers == crew.wanted:
        return Decision(state, (), f"the job has {workers} workers already")
    changed: Active = replace(state, crew=resized(crew, workers))
    reason = f"the job goes on with {workers} workers instead of {crew.wanted}"
    actions = (RecordResize(crew.wanted, workers), *call_together(changed))
    return form_if_ready(changed, actions, reason, now)


def _why_not_resized(crew: Crew, workers: int) -> str:
    if not 1 <= workers <= crew.terms.lanes:
        return f"it has {crew.terms.lanes} lanes, so 1 to {crew.terms.lanes} are possible."
    if workers < crew.terms.min_workers:
        return f"min_workers is {crew.terms.min_workers}."
    return f"it is stopping ({crew.stop})." if crew.stop is not None else ""


def _lose_launcher(state: Active) -> Decision:
    """A launcher that has asked for a stop does not wait for workers that are still being built: nothing is lost."""
    stop = state.crew.stop
    if stop is None or not isinstance(state, Forming) or state.crew.has_state:
        return end(autopsy_of_launcher())
    result = {"ending": stop}
    return Decision(Ended(None, result), (EndJob(None, "", result),), f"stopped before the first step: {stop}")


def _complete(state: Active, event: Completed) -> Decision:
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
        died = replace(state, crew=replace(crew, victims=with_victim(crew.victims, event, known)))
        return lose(died, known, failure, _since_first_sign(crew, now), now, expel=False)
    # An earlier coordinator may have let it go.
    if process in crew.dismissed or event.exit_code == LEFT:
        return _see_off(state, event, now)
    if process in crew.reaped | crew.expelled:
        return _reap(state, event, now)
    reaped: Active = replace(state, crew=replace(crew, reaped=crew.reaped | {process}))
    if isinstance(reaped, Recalling) and process in reaped.missing:
        reaped = replace(reaped, missing=reaped.missing - {process})
        failure = autopsy_of_exit(event, None, had_joined=True)
    elif event.worker not in crew.awaited:
        return Decision(
            reaped, (), f"a process of worker {event.worker} (pid {event.pid}) has ended, which is no member"
        )
    return fill_place(reaped, event.worker, failure, (RecordLoss(failure, 0.0),), now, is_vacant=True)


def _reap(state: Active, event: ExitReported, now: float) -> Decision:
    """One whose loss has been told is gone for sure: now its place is free."""
    crew, process = state.crew, (event.worker, event.pid)
    reason = f"worker {event.worker} (pid {event.pid}), which counted as lost, is gone"
    if process in crew.reaped and event.worker not in crew.awaited:
        return Decision(state, (), reason)
    # Where the answer was lost it is told again; the answer is given again, and nobody is counted twice.
    crew = replace(crew, expelled=crew.expelled - {process}, reaped=crew.reaped | {process})
    return vacate(replace(state, crew=crew), event.worker, (), reason, now)


def _see_off(state: Active, event: ExitReported, now: float) -> Decision:
    """One that was let go is gone, which is no failure; its place is for another, if there still is one."""
    crew, process = state.crew, (event.worker, event.pid)
    is_wanted = event.worker in places(crew)
    awaited = crew.awaited | ({event.worker} if is_wanted else set())
    crew = replace(crew, dismissed=crew.dismissed - {process}, reaped=crew.reaped | {process}, awaited=awaited)
    reason = f"worker {event.worker} (pid {event.pid}) has left"
    left: Active = replace(state, crew=crew)
    if isinstance(left, Recalling):
        left = replace(left, missing=left.missing - {process})
    return vacate(left, event.worker, (), reason, now) if is_wanted else form_if_ready(left, (), reason, now)


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
    if isinstance(state, Recalling):
        return _give_up_missing(state, now)
    if stall := find_stall(state.crew, now):
        return _act_on_stall(state, stall, now)
    if isinstance(state, Training):
        return _let_in_again(state, now)
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


def _give_up_missing(state: Recalling, now: float) -> Decision:
    """Those who have not come back are lost, one after the other; until then nobody is who was not reaped."""
    if not state.missing or now - state.since < state.crew.terms.timing.failure_timeout:
        return Decision(state, (), "nothing is overdue")
    worker, pid = process = min(state.missing)
    failure = autopsy_of_no_return(worker, pid, state.crew.terms)
    crew = replace(state.crew, expelled=state.crew.expelled | {process})
    left = replace(state, crew=crew, missing=state.missing - {process})
    actions = (RecordLoss(failure, now - state.since), Expel(worker, pid))
    return fill_place(left, worker, failure, actions, now, is_vacant=False)


def _let_in_again(state: Training, now: float) -> Decision:
    """Who was left out for a bad link is let in again at a step boundary: to train with it is to try it."""
    crew = state.crew
    back = who_may_return(crew, now) if crew.stop is None and not state.is_called else {}
    if not back:
        return Decision(state, (), "nothing is overdue")
    told = ", ".join(
        f"worker {worker} (its link between workers {link.pair[0]} and {link.pair[1]} has rested"
        f" {now - link.failed:.1f} s)"
        for worker, link in back.items()
    )
    action = Regroup(state.generation.id, at_boundary=True)
    return Decision(replace(state, is_called=True), (action,), f"let in again at the next step boundary: {told}")


def _give_up_forming(state: Forming, now: float) -> Decision:
    crew = state.crew
    terms = crew.terms
    is_short = len(crew.enrolled) < max(1, terms.min_workers) or not crew.has_state
    if crew.awaited and is_short and now - state.since >= terms.registration_limit:
        return end(autopsy_of_absence(sorted(crew.awaited), len(crew.enrolled), terms))
    return Decision(state, (), "nothing is overdue")
