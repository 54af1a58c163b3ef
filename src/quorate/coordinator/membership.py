"""Who belongs to the job and how it goes on, as one pure function: `decide(state, event, now)`.

A lost worker costs a generation, not the job: the others report where they stand, and go on without it; another takes
its place. A broken link is a symptom: whoever meets one leaves its generation, and the next begins when the death or
the silence behind it is known, or when everybody has turned out to be alive. A link that fails twice like that is
avoided (weak_links.py). What user code raises ends the job.
"""

from dataclasses import replace
from typing import assert_never

from quorate.coordinator.actions import RecordEvents, Refuse
from quorate.coordinator.decision import Decision
from quorate.coordinator.events import (
    Completed,
    ExitReported,
    FailureReported,
    HeartbeatReceived,
    LauncherGone,
    MembershipEvent,
    Registered,
    ResizeRequested,
    SaveRequested,
    StateReported,
    StopRequested,
    Tick,
)
from quorate.coordinator.hearing import complete, hear, promise
from quorate.coordinator.joining import register
from quorate.coordinator.losing import report, see_exit
from quorate.coordinator.states import Active, Crew, Ended, Forming, State
from quorate.coordinator.terms import Terms
from quorate.coordinator.waiting import tick
from quorate.coordinator.wishes import lose_launcher, resize, save, stop
from quorate.core.errors import FrameError
from quorate.core.failure import Failure


def start(terms: Terms, now: float) -> Forming:
    """The state of a coordinator that has just begun to serve."""
    everybody = frozenset(range(terms.workers + terms.spares))
    return Forming(Crew(terms, ticked=now, wanted=terms.workers, awaited=everybody), since=now)


def decide(state: State, event: MembershipEvent, now: float) -> Decision:  # noqa: C901, PLR0912 (one case for each event)
    """What follows from an event: the next state, what to do, and why."""
    if isinstance(state, Ended):
        return _after_the_end(state, event)
    match event:
        case Registered():
            decision = register(state, event, now)
        case HeartbeatReceived():
            decision = hear(state, event, now)
        case StateReported():
            decision = promise(state, event, now)
        case FailureReported():
            decision = report(state, event, now)
        case ExitReported():
            decision = see_exit(state, event, now)
        case Completed():
            decision = complete(state, event, now)
        case StopRequested():
            decision = stop(state, event, now)
        case ResizeRequested():
            decision = resize(state, event, now)
        case SaveRequested():
            decision = save(state, event)
        case LauncherGone():
            decision = lose_launcher(state)
        case Tick():
            decision = tick(state, now)
        case _:
            assert_never(event)
    return _remembering(_with_founders(decision), state)


def _with_founders(decision: Decision) -> Decision:
    """Where somebody holds the state again, what others have found before is out of date: it may save a newer one."""
    after = decision.state
    if isinstance(after, Ended) or not after.crew.founders or not after.crew.has_state:
        return decision
    return replace(decision, state=replace(after, crew=replace(after.crew, founders=frozenset())))


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
