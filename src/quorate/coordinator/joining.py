"""Workers that ask for a place, or come back to it."""

from dataclasses import replace

from quorate.coordinator.actions import Action, Expel, Refuse, Regroup, Welcome
from quorate.coordinator.autopsy import name_enrolled
from quorate.coordinator.comparison import join_difference
from quorate.coordinator.decision import Decision
from quorate.coordinator.events import Registered
from quorate.coordinator.forming import end, form_if_ready
from quorate.coordinator.places import call_together, places
from quorate.coordinator.states import Active, Enrolled, Recalling
from quorate.coordinator.succession import is_expected, take_back, without_missing
from quorate.core.errors import FrameError
from quorate.core.failure import Failure


def register(state: Active, event: Registered, now: float) -> Decision:
    """A process asks for a place, or comes back to it."""
    crew = state.crew
    why = _why_refused(state, event)
    if why:
        return _refuse(state, event, why)
    known = crew.find(event.worker)
    welcome = Welcome(event.worker, crew.terms.timing.lease)
    if known:
        again = replace(state, crew=crew.having(replace(known, heard=now)))
        return Decision(again, (welcome,), f"worker {event.worker} has asked again")
    if event.position is not None:
        return _return(state, event, now)
    difference = join_difference(event, crew.reference) if crew.reference else None
    if difference:
        return end(difference, Refuse(event.worker, difference))
    crew = replace(
        crew,
        enrolled=(*crew.enrolled, Enrolled(event, heard=now, cursor=event.cursor, moved=now)),
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
    is_ours = crew.find(event.worker, event.pid) is not None or is_expected(state, event.worker, event.pid)
    if event.worker not in places(crew) and not is_ours:
        return f"there is no place {event.worker}: the job has 0 to {len(places(crew)) - 1} (workers)."
    if crew.is_gone(event.worker, event.pid):
        return "it counts as lost, and its place is for another."
    known = crew.find(event.worker)
    if known and known.registration.process != event.process:
        return f"the place is taken: {name_enrolled(known)} has registered for it."
    return ""


def _return(state: Active, event: Registered, now: float) -> Decision:
    """A worker of the coordinator before this one comes back."""
    if not is_expected(state, event.worker, event.pid):
        return _refuse(state, event, "nobody waits for it: it was given up, and its place is for another.")
    position = event.position
    if state.crew.is_condemned and position and position.generation:
        return _turn_away(state, event, now)
    welcome = Welcome(event.worker, state.crew.terms.timing.lease)
    back = take_back(state, event, now)
    actions: tuple[Action, ...] = (welcome, *call_together(back))
    if not isinstance(back, Recalling) and position and position.generation and not position.has_left:
        # The others have gone on without it.
        actions = (*actions, Regroup(position.generation.id, at_boundary=False))
    return form_if_ready(back, actions, f"worker {event.worker} has come back", now)


def _turn_away(state: Active, event: Registered, now: float) -> Decision:
    """One that has trained in a generation whose replicas differed: the coordinator before could not have it killed."""
    crew, process = state.crew, (event.worker, event.pid)
    awaited = crew.awaited | ({event.worker} & set(places(crew)))
    gone: Active = replace(state, crew=replace(crew, expelled=crew.expelled | {process}, awaited=awaited))
    if isinstance(gone, Recalling):
        gone = without_missing(gone, process)
    refusal = _refuse(gone, event, "the replicas of its generation differed.")
    return form_if_ready(gone, (*refusal.actions, Expel(*process)), refusal.reason, now)


def _refuse(state: Active, event: Registered, why: str) -> Decision:
    message = f"worker {event.worker} (pid {event.pid} on host {event.host}) is refused: {why}"
    return Decision(state, (Refuse(event.worker, Failure(FrameError.__name__, message)),), message)
