"""From one generation to the next: who is lost, who takes their place, and when everybody stands ready."""

from dataclasses import replace

from quorate.coordinator.actions import (
    Action,
    DeclareGeneration,
    EndJob,
    Expel,
    Inform,
    RecordLoss,
    RecordRollback,
    Refill,
    Regroup,
    Warn,
)
from quorate.coordinator.autopsy import (
    autopsy_of_divergence,
    autopsy_of_divergences,
    autopsy_of_futility,
    autopsy_of_links,
)
from quorate.coordinator.balance import share_lanes
from quorate.coordinator.decision import Decision
from quorate.coordinator.places import call_to_save, dismiss, may_begin, places, taking_part
from quorate.coordinator.poison import find_poison, not_survived
from quorate.coordinator.ring_order import are_neighbours
from quorate.coordinator.states import Active, Crew, Ended, Enrolled, Forming, Recalling, Suspicion, Training, WeakLink
from quorate.coordinator.succession import settled
from quorate.coordinator.weak_links import (
    LineUp,
    blame_link,
    explain_line_up,
    explain_stuck,
    is_bad,
    line_up,
)
from quorate.core.errors import ReplicasDiffer
from quorate.core.failure import Failure
from quorate.core.generation import Generation, GenerationId, Member

MOST_FUTILE = 3
"""So many generations in a row may break without a loss and without a step."""

MOST_DIVERGED = 3
"""So many times in a row may replicas differ without the job getting any further in between."""

_MOST_DOUBLINGS = 10

LONGEST_BACK_OFF = 60.0
"""Seconds at most before a place is filled again whose processes give up one after the other."""
TOLD_GIVEN_UP = 3
"""After so many in a row the user is told what would help."""


def deaths_allowed(crew: Crew) -> int:
    """How many workers may be lost, without a step in between, before the job is given up.

    Few before the first generation: what keeps them from starting once will do so again.
    """
    return 2 * crew.wanted + 3 if crew.generations else 3


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
        # Who is expelled has not died of what it was doing.
        victims=() if expel else state.crew.victims,
        suspicion=None,
        links=state.crew.links_without({worker}),
        is_explained=isinstance(state, Forming) or not known.is_ready,
        # It may have saved a checkpoint after others have looked for one.
        founders=state.crew.founders if known.is_ready and not known.has_trained else frozenset(),
    )
    actions: tuple[Action, ...] = (RecordLoss(failure, detect),)
    if expel:
        actions = (*actions, Expel(worker, pid))
    left: Active = replace(state, crew=crew)
    if isinstance(state, Training) and known.within == state.generation.id:
        left, regrouping = regroup(left, now)
        actions = (*actions, *regrouping)
    return fill_place(left, worker, failure, actions, now, is_vacant=not expel)


def condemn(state: Active, failure: Failure, now: float, ended: tuple[int, int] | None = None) -> Decision:
    """The replicas of a generation differ. Wrong gradients have been in everybody's sum, so nobody holds the state of
    the job any more: all are replaced, and go on from the newest checkpoint, which all members had agreed on.

    `ended` is the process whose end has told of it.
    """
    crew = state.crew
    doomed = {(known.worker, known.registration.pid): known for known in crew.enrolled if _may_be_wrong(known)}
    processes = frozenset(doomed) | (state.missing if isinstance(state, Recalling) else frozenset())
    gone = {worker for worker, _ in processes}
    reaped = frozenset() if ended is None else frozenset({ended})
    crew = replace(
        crew,
        enrolled=tuple(known for known in crew.enrolled if not _may_be_wrong(known)),
        expelled=crew.expelled | (processes - reaped),
        reaped=crew.reaped | reaped,
        dismissed=crew.dismissed - reaped,
        awaited=crew.awaited | (gone & set(places(crew))),
        diverged=crew.diverged + 1,
        is_condemned=True,
        # What others have found before may be older than what these have saved.
        founders=frozenset(),
        accused=None,
        futile=0,
        victims=(),
        suspicion=None,
        links=crew.links_without(gone),
        is_explained=True,
    )
    blamed = gone.intersection(failure.culprits) or gone
    losses = [
        RecordLoss(autopsy_of_divergence(failure, process, doomed.get(process)), 0.0)
        for process in sorted(processes)
        if process[0] in blamed
    ]
    if crew.diverged > MOST_DIVERGED and crew.stop is None:
        return end(autopsy_of_divergences(failure, crew.diverged), *losses)
    if isinstance(state, Recalling):
        state = replace(state, missing=frozenset())
    left, regrouping = regroup(replace(state, crew=crew), now)
    actions = (*losses, *regrouping, *(Expel(*process) for process in sorted(processes - reaped)))
    reason = f"{failure.message} All go back to the newest checkpoint."
    if ended is not None:
        return vacate(left, ended[0], actions, reason, now)
    return form_if_ready(left, actions, reason, now)


def proof_against(crew: Crew) -> Failure | None:
    """That the replica of a worker which could not apply a step differs: another, with the same to apply, could."""
    accused = crew.accused
    if accused is None or accused.step is None:
        return None
    others = (known for known in crew.enrolled if known.worker != accused.worker and known.is_ready)
    other = next((known for known in others if known.has_trained and known.cursor.step >= accused.step), None)
    if other is None:
        return None
    return Failure(
        ReplicasDiffer.__name__,
        f"Worker {accused.worker} could not apply step {accused.step}, and worker {other.worker} could: their replicas "
        f"differ. {accused.message}",
        culprits=() if accused.worker is None else (accused.worker,),
    )


def _may_be_wrong(known: Enrolled) -> bool:
    """Whether it has trained, be it that it was left out since: all but those who have what they came with."""
    return known.has_trained or not known.is_ready or known.cursor != known.registration.cursor


def fill_place(
    state: Active, worker: int, failure: Failure, actions: tuple[Action, ...], now: float, *, is_vacant: bool
) -> Decision:
    """Have another process take a place, unless the job is stopping, or too many have died for nothing."""
    crew = state.crew
    if isinstance(state, Training):
        crew = replace(crew, stillborn=crew.stillborn + 1)
    else:
        crew = replace(crew, deaths=crew.deaths + 1)
    if crew.stop is None and (poison := find_poison(crew.victims)):
        return end(poison, *actions)
    if crew.deaths > deaths_allowed(crew) and crew.stop is None:
        return end(autopsy_of_futility(failure, crew.deaths, len(crew.enrolled), crew.terms), *actions)
    crew = replace(crew, awaited=crew.awaited | ({worker} & set(places(crew))))
    if is_vacant and crew.stop is None:
        actions = (*actions, *_explain_giving_up(crew, worker, failure.message))
    if not is_vacant:
        return form_if_ready(replace(state, crew=crew), actions, failure.message, now)
    return vacate(replace(state, crew=crew), worker, actions, failure.message, now)


def vacate(state: Active, worker: int, actions: tuple[Action, ...], reason: str, now: float) -> Decision:
    """The process that had a place is gone for sure: another is started.

    Not where there is no such place any more, nor where the job is stopping.
    """
    crew = state.crew
    if worker not in places(crew):
        left = replace(state, crew=replace(crew, awaited=crew.awaited - {worker}))
        return form_if_ready(left, actions, reason, now)
    if crew.stop is None:
        founders = crew.founders if crew.has_state else crew.founders | {worker}
        left = replace(state, crew=replace(crew, founders=founders))
        return form_if_ready(left, (*actions, refill(crew, worker)), reason, now)
    left = replace(state, crew=replace(crew, awaited=crew.awaited - {worker}))
    if isinstance(left, Forming) and _holds_nothing(left.crew):
        return _stopped(crew.stop, actions, reason)
    return form_if_ready(left, actions, reason, now)


def _stopped(why: str, actions: tuple[Action, ...], reason: str) -> Decision:
    result = {"ending": why}
    return Decision(Ended(None, result), (*actions, EndJob(None, "", result)), f"{reason}; stopped: {why}")


def _holds_nothing(crew: Crew) -> bool:
    """Whether nobody has the state of the job, nor comes out of a generation perhaps with it."""
    return not crew.has_state and all(known.is_ready for known in crew.enrolled)


def refill(crew: Crew, worker: int) -> Refill:
    """At once, and more slowly the longer nothing comes of it; from a checkpoint where nobody is sure to have more."""
    timing = crew.terms.timing
    excess = min(crew.deaths + crew.stillborn - crew.wanted, _MOST_DOUBLINGS)
    after = 0.0 if excess <= 0 else min(timing.failure_timeout, timing.heartbeat_every * 2**excess)
    return Refill(worker, max(after, _back_off(crew, worker)), restore=not crew.has_state)


def _back_off(crew: Crew, worker: int) -> float:
    """What one process in a place lacks the next may lack too, and each that comes costs the others a generation."""
    times = min(crew.given_up.get(worker, 0), _MOST_DOUBLINGS)
    return 0.0 if times < 2 else min(LONGEST_BACK_OFF, 2.0 ** (times - 2))


def _explain_giving_up(crew: Crew, worker: int, why: str) -> tuple[Action, ...]:
    if crew.given_up.get(worker) != TOLD_GIVEN_UP:
        return ()
    resize = f", and `quorate resize RUN {crew.wanted - 1}` makes do with fewer workers" if crew.wanted > 1 else ""
    message = (
        f"{TOLD_GIVEN_UP} processes in a row have given up in the place of worker {worker}, none with a completed step."
        f" The last: {why.rstrip('.')}. The next is started in {_back_off(crew, worker):.0f} s, the ones after it"
        f" later and later. If it lacks memory, a smaller batch_size needs less{resize}."
    )
    return (Warn(message, crew.cursor.step),)


def regroup(state: Active, now: float) -> tuple[Active, tuple[Action, ...]]:
    """End the generation that is at work, if there is one: its members report where they stand."""
    if not isinstance(state, Training):
        return state, ()
    return Forming(state.crew, since=now), (Regroup(state.generation.id, at_boundary=False),)


def form_if_ready(state: Active, actions: tuple[Action, ...], reason: str, now: float) -> Decision:
    """Begin the next generation if everybody who is to take part stands ready."""
    state, recalled = settled(state, now)
    actions = (*actions, *recalled)
    if isinstance(state, Recalling):
        return Decision(state, actions, f"{reason}; {len(state.missing)} have not come back yet")
    crew, dismissals = dismiss(state.crew, is_training=isinstance(state, Training))
    state, actions = replace(state, crew=crew), (*actions, *dismissals)
    if isinstance(state, Training):
        return Decision(state, actions, reason)
    is_deserted = not crew.enrolled and not crew.awaited
    if crew.stop is not None and (crew.generations or is_deserted) and _holds_nothing(crew):
        # There is nothing to save that is not saved: to begin once more would only take the job back.
        return _stopped(crew.stop, actions, reason)
    waiting = _waits_for(crew)
    if waiting:
        return Decision(state, actions, f"{reason}; {waiting}")
    form = _form if may_begin(crew) else _begin_from_checkpoint
    return form(state, actions, reason, now)


def _form(state: Forming, actions: tuple[Action, ...], reason: str, now: float) -> Decision:
    """Begin the next generation with those who are here."""
    crew, blamed = blame_link(state.crew)
    chosen = line_up(crew, now)
    generation = form_generation(crew, chosen)
    is_treated = blamed is not None and is_bad(blamed) and not _is_stuck(blamed, chosen)
    # Further than ever: who begins again from a checkpoint comes past old steps each time, and dies where others did.
    advanced = generation.cursor > crew.furthest or crew.generations == 0
    futile = 0 if advanced or is_treated else crew.futile + (1 if crew.suspicion else 0)
    if futile > MOST_FUTILE and crew.suspicion is not None:
        return end(autopsy_of_links(_last_symptom(crew, crew.suspicion, blamed), futile), *actions)
    told = [*_explain_beginning(crew, generation), *explain_line_up(crew, blamed, chosen)]
    rollback = (RecordRollback(generation.cursor.step),) if crew.is_condemned else ()
    crew = replace(
        crew,
        enrolled=tuple(_at_work(known, generation) for known in crew.enrolled),
        generations=generation.id.number,
        cursor=generation.cursor,
        formed=now,
        furthest=max(crew.furthest, generation.cursor),
        ring=chosen.ring,
        deaths=0 if advanced else crew.deaths,
        diverged=0 if advanced else crew.diverged,
        is_condemned=False,
        accused=None,
        stillborn=0,
        victims=not_survived(crew.victims, generation.cursor),
        futile=futile,
        suspicion=None,
        is_explained=False,
    )
    count = f"{len(generation.members)} of {crew.wanted} workers"
    begins = f"generation {generation.id} begins with {count} at step {generation.cursor.step}"
    warnings = (Warn(sentence, generation.cursor.step) for sentence in told)
    begun = Training(crew, generation)
    return Decision(
        begun,
        (*actions, *warnings, *rollback, DeclareGeneration(generation), *call_to_save(begun)),
        "; ".join((reason, *(sentence.rstrip(".") for sentence in told), begins)),
    )


def _explain_beginning(crew: Crew, generation: Generation) -> list[str]:
    """That a job begins once more, as a sentence: nobody shall wonder where its steps have gone."""
    if not crew.generations or crew.has_state or generation.cursor.step:
        return []
    return ["nobody holds the state of the job any more, and no checkpoint exists: it begins again with step 1."]


def _begin_from_checkpoint(state: Forming, actions: tuple[Action, ...], reason: str, now: float) -> Decision:
    """Have one process make room for another that begins from the newest checkpoint; the rest copy from that.

    It holds nothing, and is killed rather than asked: one that does not answer would be waited for without end.
    """
    first = min(state.crew.enrolled, key=lambda known: known.worker)
    process = (first.worker, first.registration.pid)
    crew = replace(
        state.crew,
        enrolled=tuple(known for known in state.crew.enrolled if known is not first),
        expelled=state.crew.expelled | {process},
        awaited=state.crew.awaited | {first.worker},
        links=state.crew.links_without({first.worker}),
    )
    told = (
        "nobody holds the state of the job any more: another process in the place of worker"
        f" {first.worker} looks for the newest checkpoint"
    )
    left = replace(state, crew=crew, since=now)
    return Decision(left, (*actions, Inform(f"{told}.", crew.cursor.step), Expel(*process)), f"{reason}; {told}")


def _is_stuck(link: WeakLink, chosen: LineUp) -> bool:
    """Whether the next generation has a bad link just like the last."""
    both_take_part = set(link.pair) <= set(chosen.ring)
    return both_take_part and (not link.apart_helps or are_neighbours(link.pair, chosen.ring))


def _last_symptom(crew: Crew, suspicion: Suspicion, blamed: WeakLink | None) -> Failure:
    """Without its peer: that is for us, and what ends a job tells it in words."""
    failure = suspicion.failure.at(peer=None)
    if blamed is None or not is_bad(blamed):
        return failure
    return failure.at(message=f"{failure.message.rstrip('.')}; {explain_stuck(crew)}.")


def _at_work(known: Enrolled, generation: Generation) -> Enrolled:
    """Who is behind has the state only when it has copied it, which its next report tells.

    Who is left out goes on waiting, while the others leave behind what it holds.
    """
    if known.worker not in (member.worker for member in generation.members):
        return replace(known, has_trained=False)
    has_trained = known.has_trained or known.cursor == generation.cursor
    return replace(known, within=generation.id, has_trained=has_trained, is_saved=False)


def form_generation(crew: Crew, chosen: LineUp) -> Generation:
    """Those who take part, in their order, with the lanes that each hosts."""
    taking_part = [known for worker in chosen.ring if (known := crew.find(worker)) is not None]
    members = (
        Member(known.worker, known.registration.address, lanes, known.registration.local_address, known.cursor)
        for known, lanes in zip(taking_part, share_lanes(crew, taking_part), strict=True)
    )
    return Generation(GenerationId(crew.terms.incarnation, crew.generations + 1), tuple(members))


def _waits_for(crew: Crew) -> str:
    """What the next generation waits for; empty when it need not wait."""
    busy = [str(known.worker) for known in crew.enrolled if not known.is_ready]
    if busy:
        return f"worker{'s' if len(busy) > 1 else ''} {', '.join(busy)} must leave the last generation first"
    here = len(taking_part(crew))
    # Without anybody who holds the state, all begin together; otherwise those who can go on do. Once there was a state,
    # those who are on their way bring it back from a checkpoint: a spare that is here holds just a beginning.
    coming = crew.awaited | ({worker for worker, _ in crew.dismissed} & set(places(crew)))
    if coming and not crew.has_state and (here < crew.wanted or crew.generations):
        return f"{here} of {crew.wanted} workers are here"
    # To stop, those who are left suffice: nobody else will come.
    needed = crew.terms.min_workers if crew.stop is None else 1
    if here < max(1, needed):
        return f"{here} workers are here, and min_workers is {crew.terms.min_workers}"
    return ""
