"""The places of a job: how many there are, who takes part, who is a spare, and who leaves.

There is a place for each worker that is wanted, and for each spare. A spare is enrolled like the others, with its model
built, and waits: a generation takes as many as are wanted, those first who hold the state of the job. Whoever leaves
does so between two generations, and hands over first: to those who stay or, where nobody stays who holds the state, to
a checkpoint.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace

from quorate.coordinator.actions import Action, Dismiss, Regroup
from quorate.coordinator.states import Active, Crew, Enrolled, Suspicion, Training
from quorate.core.cursor import Cursor


def places(crew: Crew) -> range:
    """Every place that is to be filled."""
    return range(crew.wanted + crew.terms.spares)


def taking_part(crew: Crew) -> list[Enrolled]:
    """Who makes up the next generation if nothing speaks against it, by their ids."""
    staying = _furthest_first(known for known in crew.enrolled if not known.is_leaving)
    chosen = staying[: crew.wanted]
    if must_hand_over(crew):
        leaving = sorted(_holders(crew), key=lambda known: known.worker)
        # Those who stay copy from one who leaves, for as long as that takes; unless it would host no lane.
        chosen = [leaving[0], *staying[: min(crew.wanted, crew.terms.lanes - 1)]] if staying else leaving[: crew.wanted]
    return sorted(chosen, key=lambda known: known.worker)


def _furthest_first(workers: Iterable[Enrolled]) -> list[Enrolled]:
    """Those first who need not copy anything and are at work already; else those who have most to begin with."""
    by_id = sorted(workers, key=lambda known: known.worker)
    by_cursor = sorted(by_id, key=lambda known: Cursor() if known.has_trained else known.cursor, reverse=True)
    return sorted(by_cursor, key=lambda known: known.is_ready and not known.has_trained)


def must_hand_over(crew: Crew) -> bool:
    """Whether the state would be lost with those who leave, because nobody else holds it.

    Where nobody is there to copy it a checkpoint is enough.
    """
    holders = _holders(crew)
    if not holders or not all(known.is_leaving for known in holders):
        return False
    can_be_copied = crew.terms.lanes > 1 and any(not known.is_leaving for known in crew.enrolled)
    return can_be_copied or not any(known.is_saved for known in holders)


def _holders(crew: Crew) -> list[Enrolled]:
    """Who holds the state of the job: those at work, or, where all have told how far they are, the furthest."""
    trained = [known for known in crew.enrolled if known.has_trained]
    if not all(known.is_ready for known in crew.enrolled):
        return trained
    return [known for known in trained if known.cursor == max(one.cursor for one in trained)]


def may_begin(crew: Crew) -> bool:
    """Whether those who are here may form a generation: nobody begins from nothing where there may be a checkpoint.

    The first begins with what its workers were started with. After that somebody holds the state, or has looked for the
    newest checkpoint since nobody does: whoever was started before would silently take the job back to its beginning.
    """
    has_founder = any(known.worker in crew.founders and not known.is_leaving for known in crew.enrolled)
    return not crew.generations or crew.has_state or has_founder


def call_together(state: Active) -> tuple[Action, ...]:
    """End the generation at work at the next step boundary, if another would be made up differently."""
    if not isinstance(state, Training):
        return ()
    members = {member.worker for member in state.generation.members}
    if members == {known.worker for known in taking_part(state.crew)}:
        return call_to_save(state)
    return (Regroup(state.generation.id, at_boundary=True, saves=must_hand_over(state.crew)),)


def call_to_save(state: Training) -> tuple[Action, ...]:
    """End the generation at work at the next step boundary with a checkpoint, if its members have nobody but that."""
    return (Regroup(state.generation.id, at_boundary=True, saves=True),) if must_hand_over(state.crew) else ()


def mark_leaving(crew: Crew, workers: Collection[int]) -> Crew:
    """These leave as soon as they can."""
    enrolled = tuple(replace(known, is_leaving=known.is_leaving or known.worker in workers) for known in crew.enrolled)
    return replace(crew, enrolled=enrolled)


def dismiss(crew: Crew, *, is_training: bool) -> tuple[Crew, tuple[Action, ...]]:
    """Let those go who want to leave and can: they are in no generation, and others hold the state, or a checkpoint.

    Between two generations not before everybody has left the last: whoever has not may be dead.
    """
    is_safe = is_training or (all(known.is_ready for known in crew.enrolled) and not must_hand_over(crew))
    return (
        let_go(crew, [known for known in crew.enrolled if known.is_leaving and known.is_ready])
        if is_safe
        else (crew, ())
    )


def let_go(crew: Crew, going: Collection[Enrolled]) -> tuple[Crew, tuple[Action, ...]]:
    """Tell these to leave."""
    processes = frozenset((known.worker, known.registration.pid) for known in going)
    left = tuple(known for known in crew.enrolled if known not in going)
    actions = tuple(Dismiss(worker, pid) for worker, pid in sorted(processes))
    gone = {worker for worker, _ in processes}
    crew = replace(crew, enrolled=left, dismissed=crew.dismissed | processes)
    return replace(crew, links=crew.links_without(gone), suspicion=_without(crew.suspicion, gone)), actions


def _without(suspicion: Suspicion | None, gone: Collection[int]) -> Suspicion | None:
    if suspicion is None:
        return None
    symptoms = tuple(told for told in suspicion.symptoms if told.worker not in gone and told.peer not in gone)
    return replace(suspicion, symptoms=symptoms) if symptoms else None


def resized(crew: Crew, workers: int) -> Crew:
    """With another number of workers: new places are awaited, and whoever has one that is no more leaves."""
    crew = replace(crew, wanted=workers)
    taken = {known.worker for known in crew.enrolled} | {worker for worker, _ in crew.expelled | crew.dismissed}
    awaited = (crew.awaited | (set(places(crew)) - taken)) & set(places(crew))
    surplus = [known.worker for known in crew.enrolled if known.worker not in places(crew)]
    return mark_leaving(replace(crew, awaited=frozenset(awaited)), surplus)
