"""Who belongs to the job and how it ends, as one pure function: `decide(state, event, now)`.

The job ends once, with the first real cause. A broken link is a symptom: whoever reports one is heard, and then the
coordinator waits up to `failure_timeout` for the death, the silence or the exception behind it.
"""

from dataclasses import replace
from typing import assert_never

from quorate.coordinator.autopsy import (
    autopsy_of_absence,
    autopsy_of_exit,
    autopsy_of_launcher,
    autopsy_of_link,
    autopsy_of_silence,
    name_enrolled,
)
from quorate.coordinator.comparison import completion_difference, join_difference
from quorate.coordinator.records import (
    Action,
    Active,
    Completed,
    Crew,
    Decision,
    DeclareGeneration,
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
    Refuse,
    Registered,
    RelayStop,
    State,
    StopRequested,
    Suspicion,
    Terms,
    Tick,
    Training,
    Welcome,
)
from quorate.core.errors import FrameError, LinkError
from quorate.core.failure import Failure
from quorate.core.generation import Generation, GenerationId, Member
from quorate.lanes.hosting import host_lanes


def start(terms: Terms, now: float) -> Forming:
    """The state of a coordinator that has just begun to serve."""
    return Forming(Crew(terms, ticked=now), since=now)


def decide(state: State, event: MembershipEvent, now: float) -> Decision:
    """What follows from an event: the next state, what to do, and why."""
    if isinstance(state, Ended):
        return _after_the_end(state, event)
    match event:
        case Registered():
            decision = _register(state, event, now)
        case HeartbeatReceived():
            decision = _hear(state, event, now)
        case FailureReported():
            decision = _report(state, event, now)
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


def _end(failure: Failure, *before: Action) -> Decision:
    return Decision(Ended(failure), (*before, EndJob(failure)), failure.message)


# --- joining


def _register(state: Active, event: Registered, now: float) -> Decision:
    crew = state.crew
    if not 0 <= event.worker < crew.terms.workers:
        return _refuse(
            state, event, f"there is no place {event.worker}: the job has 0 to {crew.terms.workers - 1} (workers)."
        )
    known = crew.find(event.worker)
    if known and known.registration.process != event.process:
        return _refuse(state, event, f"the place is taken: {name_enrolled(known)} has registered for it.")
    welcome = Welcome(event.worker, crew.terms.timing.lease)
    if known:
        return Decision(state, (welcome,), f"worker {event.worker} has asked again")
    difference = join_difference(event, crew.enrolled[0].registration) if crew.enrolled else None
    if difference:
        return _end(difference, Refuse(event.worker, difference))
    joined = replace(crew, enrolled=(*crew.enrolled, Enrolled(event, heard=now)))
    return _form_when_all_are_here(replace(state, crew=joined), welcome)


def _refuse(state: Active, event: Registered, why: str) -> Decision:
    message = f"worker {event.worker} (pid {event.pid} on host {event.host}) is refused: {why}"
    return Decision(state, (Refuse(event.worker, Failure(FrameError.__name__, message)),), message)


def _form_when_all_are_here(state: Active, welcome: Welcome) -> Decision:
    crew = state.crew
    count = f"{len(crew.enrolled)} of {crew.terms.workers}"
    if len(crew.enrolled) < crew.terms.workers:
        return Decision(state, (welcome,), f"worker {welcome.worker} has registered, {count}")
    generation = form_generation(crew, GenerationId(crew.terms.incarnation, 1))
    reason = f"all workers have registered, {count}: generation {generation.id} begins"
    return Decision(Training(crew, generation), (welcome, DeclareGeneration(generation)), reason)


def form_generation(crew: Crew, generation: GenerationId) -> Generation:
    """Everyone that is enrolled, in the order of their ids, with the lanes shared as evenly as can be."""
    registrations = sorted((known.registration for known in crew.enrolled), key=lambda each: each.worker)
    hosting = host_lanes(crew.terms.lanes, len(registrations))
    members = (
        Member(each.worker, each.address, lanes, each.local_address)
        for each, lanes in zip(registrations, hosting, strict=True)
    )
    return Generation(generation, tuple(members))


# --- living


def _hear(state: Active, event: HeartbeatReceived, now: float) -> Decision:
    known = state.crew.find(event.worker)
    if known is None:
        return Decision(state, (), f"worker {event.worker} sends heartbeats but has not registered: no lease")
    if not _is_current(state, event.generation):
        return Decision(state, (), f"worker {event.worker} is of generation {event.generation}: no lease")
    heard = replace(known, heard=now)
    actions: tuple[Action, ...] = (GrantLease(event.worker, state.crew.terms.timing.lease),)
    # A heartbeat that is sent again because its answer was lost has told its events already.
    if event.sequence > known.sequence:
        heard = replace(heard, sequence=event.sequence, place=event.place)
        actions = (*actions, RecordEvents(event.events)) if event.events else actions
    return Decision(replace(state, crew=_with(state.crew, heard)), actions, f"worker {event.worker} is alive")


def _is_current(state: Active, generation: GenerationId) -> bool:
    """Whether a heartbeat may renew a lease. A worker that has not yet learned its generation sends none, (0, 0)."""
    if generation == GenerationId(0, 0):
        return True
    return isinstance(state, Training) and generation == state.generation.id


def _with(crew: Crew, changed: Enrolled) -> Crew:
    return replace(
        crew, enrolled=tuple(changed if known.worker == changed.worker else known for known in crew.enrolled)
    )


def _stop(state: Active, event: StopRequested) -> Decision:
    if state.crew.stop is not None:
        return Decision(state, (), f"a stop is under way already ({state.crew.stop})")
    stopping = replace(state, crew=replace(state.crew, stop=event.reason))
    return Decision(stopping, (RelayStop(event.reason),), f"stop at the next step boundary: {event.reason}")


def _lose_launcher(state: Active) -> Decision:
    """A launcher that has asked for a stop does not wait for workers that are still being built: nothing is lost."""
    stop = state.crew.stop
    if stop is None or not isinstance(state, Forming):
        return _end(autopsy_of_launcher())
    result = {"ending": stop}
    return Decision(Ended(None, result), (EndJob(None, "", result),), f"stopped before the first step: {stop}")


def _complete(state: Active, event: Completed) -> Decision:
    if isinstance(state, Forming):
        return Decision(state, (), f"worker {event.worker} is done before a generation was formed: ignored")
    if event.worker not in {member.worker for member in state.generation.members}:
        return Decision(state, (), f"worker {event.worker} is done but is no member: ignored")
    completed = (*(done for done in state.completed if done.worker != event.worker), event)
    count = f"{len(completed)} of {len(state.generation.members)}"
    if len(completed) < len(state.generation.members):
        return Decision(replace(state, completed=completed), (), f"worker {event.worker} is done, {count}")
    in_order = sorted(completed, key=lambda done: state.generation.position(done.worker))
    difference = completion_difference(in_order)
    if difference:
        return _end(difference)
    first = in_order[0]
    reason = f"all workers are done with equal weights {first.digest}, {count}"
    return Decision(Ended(None, first.result), (EndJob(None, first.digest, first.result),), reason)


# --- failing


def _report(state: Active, event: FailureReported, now: float) -> Decision:
    known = state.crew.find(event.worker)
    failure = event.failure
    if failure.worker is None:
        failure = failure.at(worker=event.worker)
    if known and failure.step is None:
        failure = failure.at(step=known.place.step, phase=failure.phase or known.place.phase)
    if failure.kind not in _symptom_kinds():
        return _end(failure)
    crew = _excuse(state.crew, event.worker)
    crew = replace(crew, suspicion=crew.suspicion or Suspicion(failure, now))
    reason = f"worker {event.worker} reports a symptom, waiting for its cause: {failure.message}"
    return _blame_link_when_nobody_is_left(replace(state, crew=crew), now, reason)


def _symptom_kinds() -> set[str]:
    """Every kind of error between two processes: one of them is the trouble, and neither knows which."""
    kinds: list[type[LinkError]] = [LinkError]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
    return {kind.__name__ for kind in kinds}


def _exit(state: Active, event: ExitReported, now: float) -> Decision:
    if event.worker in state.crew.excused:
        reason = f"worker {event.worker} has exited after it had told why"
        return _blame_link_when_nobody_is_left(state, now, reason)
    return _end(autopsy_of_exit(event, state.crew.find(event.worker)))


def _excuse(crew: Crew, worker: int | None) -> Crew:
    return crew if worker is None else replace(crew, excused=crew.excused | {worker})


def _blame_link_when_nobody_is_left(state: Active, now: float, reason: str) -> Decision:
    """Wait for the cause, unless every worker has given a symptom: then nobody is left who could be the cause."""
    if state.crew.excused.issuperset(range(state.crew.terms.workers)):
        return _blame_link(state.crew, now)
    return Decision(state, (), reason)


def _blame_link(crew: Crew, now: float) -> Decision:
    assert crew.suspicion is not None
    return _end(autopsy_of_link(crew.suspicion, crew.find(crew.suspicion.failure.worker), now, crew.terms))


# --- waiting


def _tick(state: Active, now: float) -> Decision:
    crew = state.crew
    timeout = crew.terms.timing.failure_timeout
    if now - crew.ticked > timeout / 2:
        return _forgive_silence(state, now)
    state = replace(state, crew=replace(crew, ticked=now))
    quietest = min(
        (known for known in crew.enrolled if known.worker not in crew.excused),
        key=lambda known: known.heard,
        default=None,
    )
    if quietest and now - quietest.heard >= timeout:
        return _end(autopsy_of_silence(quietest, now, crew.terms))
    # Somebody who has gone quiet is about to be either heard or lost, and is the better explanation.
    is_quiet = quietest is not None and now - quietest.heard >= timeout / 2
    if crew.suspicion and now - crew.suspicion.since >= timeout and not is_quiet:
        return _blame_link(crew, now)
    return _give_up_forming(state, now)


def _forgive_silence(state: Active, now: float) -> Decision:
    """Nobody is lost by a pause of the coordinator itself (a suspended machine, a stopped process group)."""
    crew = state.crew
    heard = tuple(replace(known, heard=now) for known in crew.enrolled)
    suspicion = crew.suspicion and replace(crew.suspicion, since=now)
    reason = f"the coordinator was held up for {now - crew.ticked:.1f} s; silence counts from now"
    return Decision(replace(state, crew=replace(crew, ticked=now, enrolled=heard, suspicion=suspicion)), (), reason)


def _give_up_forming(state: Active, now: float) -> Decision:
    terms = state.crew.terms
    if isinstance(state, Forming) and now - state.since >= terms.registration_limit:
        missing = [worker for worker in range(terms.workers) if state.crew.find(worker) is None]
        return _end(autopsy_of_absence(missing, terms))
    return Decision(state, (), "nothing is overdue")
