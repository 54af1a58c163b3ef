"""What is wanted from outside: a stop, a checkpoint, another number of workers; and nobody left to want anything."""

from dataclasses import replace

from quorate.coordinator.actions import EndJob, RecordResize, Refuse, RelaySave, RelayStop
from quorate.coordinator.autopsy import autopsy_of_launcher
from quorate.coordinator.decision import Decision
from quorate.coordinator.events import ResizeRequested, SaveRequested, StopRequested
from quorate.coordinator.forming import end, form_if_ready
from quorate.coordinator.places import call_together, resized
from quorate.coordinator.states import Active, Crew, Ended, Forming, Training
from quorate.core.failure import Failure


def stop(state: Active, event: StopRequested, now: float) -> Decision:
    """The job shall stop at the next step boundary."""
    if state.crew.stop is not None:
        return Decision(state, (), f"a stop is under way already ({state.crew.stop})")
    stopping = replace(state, crew=replace(state.crew, stop=event.reason))
    return form_if_ready(stopping, (RelayStop(event.reason),), f"stop at the next step boundary: {event.reason}", now)


def save(state: Active, event: SaveRequested) -> Decision:
    """A checkpoint shall be saved. Between two generations nobody can: whoever wants one asks again."""
    if not isinstance(state, Training):
        return Decision(state, (), "a checkpoint is wanted while no generation is at work: to be asked for again")
    generation = state.generation.id
    return Decision(
        state, (RelaySave(generation, event.request),), f"a checkpoint is wanted of generation {generation}"
    )


def resize(state: Active, event: ResizeRequested, now: float) -> Decision:
    """The job shall go on with another number of workers."""
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


def lose_launcher(state: Active) -> Decision:
    """A launcher that has asked for a stop does not wait for workers that are still being built: nothing is lost."""
    stop = state.crew.stop
    if stop is None or not isinstance(state, Forming) or state.crew.has_state:
        return end(autopsy_of_launcher())
    result = {"ending": stop}
    return Decision(Ended(None, result), (EndJob(None, "", result),), f"stopped before the first step: {stop}")
