"""From one generation to the next: who is lost, who takes their place, and when everybody stands ready."""

from dataclasses import replace

from quorate.coordinator.autopsy import autopsy_of_futility, autopsy_of_links
from quorate.coordinator.records import (
    Action,
    Active,
    Crew,
    Decision,
    DeclareGeneration,
    Ended,
    EndJob,
    Enrolled,
    Expel,
    Forming,
    RecordLoss,
    Refill,
    Regroup,
    Training,
)
from quorate.core.failure import Failure
from quorate.core.generation import Generation, GenerationId, Member
from quorate.lanes.hosting import host_lanes

MOST_FUTILE = 3
"""So many generations in a row may break without a loss and without a step."""

_MOST_DOUBLINGS = 10


def deaths_allowed(crew: Crew) -> int:
    """How many workers may be lost, without a step in between, before the job is given up.

    Few before the first generation: what keeps them from starting once will do so again.
    """
    return 2 * crew.terms.workers + 3 if crew.generations else 3


def end(failure: Failure, *before: Action) -> Decision:
    """The job is over."""
    return Decision(Ended(failure), (*before, EndJob(failure)), failure.message)


def lose(state: Active, known: Enrolled, failure: Failure, detect: float, now: float, *, expel: bool) -> Decision:
    """A registered worker is gone, or counts as gone: the others go on without it, and another takes its place.

    One that is expelled is replaced when its process has been reaped: until then it may still write somewhere.
    """
    worker, pid = known.worker, known.registration.pid
    crew = replace(
        state.crew,
        enrolled=tuple(other for other in state.crew.enrolled if other is not known),
        expelled=state.crew.expelled | ({(worker, pid)} if expel else set()),
        reaped=state.crew.reaped | (set() if expel else {(worker, pid)}),
        futile=0,
        suspicion=None,
    )
    actions: tuple[Action, ...] = (RecordLoss(failure, detect),)
    if expel:
        actions = (*actions, Expel(worker, pid))
    left: Active = replace(state, crew=crew)
    if not known.is_ready:
        left, regrouping = regroup(left, now)
        actions = (*actions, *regrouping)
    return fill_place(left, worker, failure, actions, is_vacant=not expel)


def fill_place(
    state: Active, worker: int, failure: Failure, actions: tuple[Action, ...], *, is_vacant: bool
) -> Decision:
    """Have another process take a place, unless the job is stopping, or too many have died for nothing."""
    crew = state.crew
    if isinstance(state, Training):
        crew = replace(crew, stillborn=crew.stillborn + 1)
    else:
        crew = replace(crew, deaths=crew.deaths + 1)
    if crew.deaths > deaths_allowed(crew) and crew.stop is None:
        return end(autopsy_of_futility(failure, crew.deaths), *actions)
    crew = replace(crew, awaited=crew.awaited | {worker})
    if not is_vacant:
        return form_if_ready(replace(state, crew=crew), actions, failure.message)
    return vacate(replace(state, crew=crew), worker, actions, failure.message)


def vacate(state: Active, worker: int, actions: tuple[Action, ...], reason: str) -> Decision:
    """The process that had a place is gone for sure: another is started, unless the job is stopping."""
    crew = state.crew
    if crew.stop is None:
        return form_if_ready(state, (*actions, refill(crew, worker)), reason)
    left = replace(state, crew=replace(crew, awaited=crew.awaited - {worker}))
    if isinstance(left, Forming) and _holds_nothing(left.crew):
        return _stopped(crew.stop, actions, reason)
    return form_if_ready(left, actions, reason)


def _stopped(why: str, actions: tuple[Action, ...], reason: str) -> Decision:
    result = {"ending": why}
    return Decision(Ended(None, result), (*actions, EndJob(None, "", result)), f"{reason}; stopped: {why}")


def _holds_nothing(crew: Crew) -> bool:
    """Whether nobody has the state of the job, nor comes out of a generation perhaps with it."""
    return not crew.has_state and all(known.is_ready for known in crew.enrolled)


def refill(crew: Crew, worker: int) -> Refill:
    """At once, and more slowly the longer nothing comes of it; from a checkpoint where nobody is sure to have more."""
    timing = crew.terms.timing
    excess = min(crew.deaths + crew.stillborn - crew.terms.workers, _MOST_DOUBLINGS)
    after = 0.0 if excess <= 0 else min(timing.failure_timeout, timing.heartbeat_every * 2**excess)
    return Refill(worker, after, restore=not crew.has_state)


def regroup(state: Active, now: float) -> tuple[Forming, tuple[Action, ...]]:
    """End the generation that is at work, if there is one: its members report where they stand."""
    if isinstance(state, Forming):
        return state, ()
    return Forming(state.crew, since=now), (Regroup(state.generation.id, at_boundary=False),)


def form_if_ready(state: Active, actions: tuple[Action, ...], reason: str) -> Decision:
    """Begin the next generation if everybody who is to take part stands ready."""
    if isinstance(state, Training):
        return Decision(state, actions, reason)
    crew = state.crew
    if crew.stop is not None and crew.generations and _holds_nothing(crew):
        # There is nothing to save that is not saved: to begin once more would only take the job back.
        return _stopped(crew.stop, actions, reason)
    waiting = _waits_for(crew)
    if waiting:
        return Decision(state, actions, f"{reason}; {waiting}")
    generation = form_generation(crew)
    advanced = generation.cursor > crew.cursor or crew.generations == 0
    futile = 0 if advanced else crew.futile + (1 if crew.suspicion else 0)
    if futile > MOST_FUTILE and crew.suspicion is not None:
        return end(autopsy_of_links(crew.suspicion.failure, futile), *actions)
    crew = replace(
        crew,
        enrolled=tuple(_at_work(known, generation) for known in crew.enrolled),
        generations=generation.id.number,
        cursor=generation.cursor,
        deaths=0 if advanced else crew.deaths,
        stillborn=0,
        futile=futile,
        suspicion=None,
    )
    count = f"{len(generation.members)} of {crew.terms.workers} workers"
    begins = f"generation {generation.id} begins with {count} at step {generation.cursor.step}"
    return Decision(Training(crew, generation), (*actions, DeclareGeneration(generation)), f"{reason}; {begins}")


def _at_work(known: Enrolled, generation: Generation) -> Enrolled:
    """Who is behind has the state only when it has copied it, which its next report tells."""
    return replace(known, is_ready=False, has_trained=known.has_trained or known.cursor == generation.cursor)


def form_generation(crew: Crew) -> Generation:
    """Everyone that is enrolled, in the order of their ids, with the lanes shared as evenly as can be."""
    enrolled = sorted(crew.enrolled, key=lambda known: known.worker)
    members = (
        Member(known.worker, known.registration.address, lanes, known.registration.local_address, known.cursor)
        for known, lanes in zip(enrolled, host_lanes(crew.terms.lanes, len(enrolled)), strict=True)
    )
    return Generation(GenerationId(crew.terms.incarnation, crew.generations + 1), tuple(members))


def _waits_for(crew: Crew) -> str:
    """What the next generation waits for; empty when it need not wait."""
    busy = [str(known.worker) for known in crew.enrolled if not known.is_ready]
    if busy:
        return f"worker{'s' if len(busy) > 1 else ''} {', '.join(busy)} must leave the last generation first"
    # Without anybody who holds the state, all begin together; otherwise those who can go on do.
    if crew.awaited and not crew.has_state:
        return f"{len(crew.enrolled)} of {crew.terms.workers} workers are here"
    # To stop, those who are left suffice: nobody else will come.
    wanted = crew.terms.min_workers if crew.stop is None else 1
    if len(crew.enrolled) < max(1, wanted):
        return f"{len(crew.enrolled)} workers are here, and min_workers is {crew.terms.min_workers}"
    return ""
