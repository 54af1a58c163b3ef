"""Failures that are told, and processes that are gone."""

from dataclasses import replace

from quorate.coordinator.actions import Action, RecordLoss
from quorate.coordinator.autopsy import autopsy_of_exit
from quorate.coordinator.decision import Decision
from quorate.coordinator.events import ExitReported, FailureReported
from quorate.coordinator.forming import (
    condemn,
    end,
    fill_place,
    form_if_ready,
    lose,
    proof_against,
    regroup,
    vacate,
)
from quorate.coordinator.places import places
from quorate.coordinator.poison import with_victim
from quorate.coordinator.states import Active, Crew, Enrolled, Recalling, Training
from quorate.coordinator.succession import without_missing
from quorate.core.errors import JobError, LinkError, ReplicasDiffer, WorkerUnfit
from quorate.core.failure import Failure
from quorate.core.worker_status import APPLY, DIVERGED, GAVE_UP, LEFT


def report(state: Active, event: FailureReported, now: float) -> Decision:
    """Somebody tells why it stops.

    User code that raises ends the job. A broken link is a symptom, and what only this worker lacks another may have.
    A process that was given up may wake once more and fail on what is gone by now: the job goes on without it.
    """
    if state.crew.is_gone(event.failure.worker if event.worker is None else event.worker, event.pid):
        return Decision(state, (), f"worker {event.worker} (pid {event.pid}) counts as lost; its report is ignored")
    if event.failure.kind == ReplicasDiffer.__name__:
        return _hear_of_divergence(state, event, now)
    known = state.crew.find(event.worker)
    failure = event.failure
    if failure.worker is None:
        failure = failure.at(worker=event.worker)
    if known and failure.step is None:
        failure = failure.at(step=known.place.step, phase=failure.phase or known.place.phase)
    if known and failure.phase == APPLY and failure.is_repeatable and _others_apply_it(state, known):
        return _accuse(state, known, failure, now)
    if failure.kind not in _kinds_of_a_loss():
        return end(failure)
    worker = failure.worker
    reason = f"worker {worker} gives up; it is lost when it exits: {failure.message}"
    if worker is None:
        return Decision(state, (), reason)
    last_words = {**state.crew.last_words, (worker, event.pid): failure.message}
    return Decision(replace(state, crew=replace(state.crew, last_words=last_words)), (), reason)


def _others_apply_it(state: Active, known: Enrolled) -> bool:
    """Whether others apply the same step to the same state, and nobody has failed in it yet."""
    if isinstance(state, Recalling) or known.is_ready or state.crew.accused is not None:
        return False
    return any(other.worker != known.worker and other.has_trained for other in state.crew.enrolled)


def _accuse(state: Active, known: Enrolled, failure: Failure, now: float) -> Decision:
    """A worker could not apply a step. That ends the job if it is the same for the others, which they tell; where they
    could, it is the replica that is wrong."""
    last_words = {**state.crew.last_words, (known.worker, known.registration.pid): failure.message}
    accusing: Active = replace(state, crew=replace(state.crew, accused=failure, last_words=last_words))
    if proof := proof_against(accusing.crew):
        return condemn(accusing, proof, now)
    return Decision(accusing, (), f"whether it is its replica is seen by the others: {failure.message}")


def _hear_of_divergence(state: Active, event: FailureReported, now: float) -> Decision:
    """All members tell the same; the first word is enough, and what comes later is of a generation that is no more."""
    known = state.crew.find(event.worker, event.pid)
    if known is None or known.within != event.generation:
        return Decision(state, (), f"worker {event.worker} tells of replicas that have been given up: ignored")
    return condemn(state, event.failure, now)


def _kinds_of_a_loss() -> set[str]:
    """Every kind of error between two processes (one of them is the trouble, and neither knows which), and every one
    that is of this worker's process or machine."""
    kinds: list[type[JobError]] = [LinkError, WorkerUnfit]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
    return {kind.__name__ for kind in kinds}


def see_exit(state: Active, event: ExitReported, now: float) -> Decision:
    """The supervisor has reaped a process."""
    told = dict(state.crew.last_words)
    # Who never registered may not have told its pid.
    last_words = [told.pop((event.worker, pid), "") for pid in (event.pid, 0)]
    crew = replace(state.crew, last_words=told)
    if event.exit_code == GAVE_UP and not crew.is_gone(event.worker, event.pid):
        crew = _count_giving_up(crew, event)
    return _after_exit(replace(state, crew=crew), event, next(filter(None, last_words), ""), now)


def _count_giving_up(crew: Crew, event: ExitReported) -> Crew:
    """A process could not go on, and has told why: the first in a row, if it has completed a step."""
    known = crew.find(event.worker, event.pid)
    step = max(known.place.step or 0, event.place.step or 0) if known and not known.is_ready else 0
    # The step that a place tells is under way: the one after the generation's cursor is its first.
    in_a_row = 0 if step > crew.cursor.step + 1 else crew.given_up.get(event.worker, 0)
    return replace(crew, given_up={**crew.given_up, event.worker: in_a_row + 1})


def _after_exit(state: Active, event: ExitReported, last_words: str, now: float) -> Decision:
    crew, process = state.crew, (event.worker, event.pid)
    known = crew.find(event.worker, event.pid)
    is_missing = isinstance(state, Recalling) and process in state.missing
    # The coordinator before may have let it go.
    is_from_before = event.exit_code == LEFT and crew.is_successor and (known is not None or is_missing)
    if event.exit_code == DIVERGED and (known is not None or is_missing or process in crew.dismissed):
        # Its word has been lost; it has ended because nobody can trust what it holds, nor what the others do.
        failure = Failure(ReplicasDiffer.__name__, f"worker {event.worker} has found that the replicas differ.")
        return condemn(state, failure, now, ended=process)
    if process in crew.dismissed or is_from_before:
        return _see_off(state, event, now)
    failure = autopsy_of_exit(event, known, last_words, had_joined=is_missing)
    if known is not None:
        died = replace(state, crew=replace(crew, victims=with_victim(crew.victims, event, known, last_words)))
        return lose(died, known, failure, _since_first_sign(crew, now), now, expel=False)
    if process in crew.reaped | crew.expelled:
        return _reap(state, event, now)
    reaped: Active = replace(state, crew=replace(crew, reaped=crew.reaped | {process}))
    if isinstance(reaped, Recalling) and is_missing:
        reaped = without_missing(reaped, process)
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
    known = crew.find(event.worker, event.pid)
    crew = replace(
        crew,
        enrolled=tuple(other for other in crew.enrolled if other is not known),
        dismissed=crew.dismissed - {process},
        reaped=crew.reaped | {process},
        awaited=awaited,
    )
    reason = f"worker {event.worker} (pid {event.pid}) has left"
    left: Active = replace(state, crew=crew)
    actions: tuple[Action, ...] = ()
    if isinstance(left, Recalling):
        left = without_missing(left, process)
    elif known is not None and isinstance(left, Training) and known.within == left.generation.id:
        left, actions = regroup(left, now)
    if is_wanted:
        return vacate(left, event.worker, actions, reason, now)
    return form_if_ready(left, actions, reason, now)


def _since_first_sign(crew: Crew, now: float) -> float:
    return now - crew.suspicion.since if crew.suspicion else 0.0
