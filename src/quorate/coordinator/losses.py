"""Workers that are lost: failures that are reported, processes that have ended, and who takes their place."""

from dataclasses import replace

from quorate.coordinator.autopsy import (
    autopsy_of_divergence,
    autopsy_of_divergences,
    autopsy_of_exit,
    autopsy_of_futility,
    loss_of,
    warning,
)
from quorate.coordinator.events import Action, ExitReported, Expel, FailureReported, Refill
from quorate.coordinator.forming import end, form_if_ready, holds_nothing, regroup, stopped, without_missing
from quorate.coordinator.places import expel, fills_places, places
from quorate.coordinator.stall import find_poison, with_victim
from quorate.coordinator.states import Active, Decision, Enrolled, Forming, Members, Recalling, Training
from quorate.core.errors import LanesDiffer, LanesDisputed, LinkError, ReplicasDiffer, WorkerUnfit, is_kind_of
from quorate.core.failure import Failure
from quorate.core.generation import APPLY, DIVERGED, ENDED_WITH_ITS_GROUP, GAVE_UP, LEFT, Cursor, Role, name_of

MOST_DIVERGED = 3
"""So many times in a row may replicas differ without the job getting any further in between."""
_MOST_DOUBLINGS = 10
LONGEST_BACK_OFF = 60.0
"""Seconds at most before a place is filled again whose processes give up one after the other."""
REPORTED_GIVEN_UP = 3
"""After so many in a row the user is told what would help."""


def on_failure_reported(state: Active, event: FailureReported, now: float) -> Decision:
    """Somebody tells why it stops.

    User code that raises ends the job. A broken link is a symptom, and what only this worker lacks another may have.
    A process that was given up may wake once more and fail on what is gone by now: the job goes on without it.
    """
    if state.members.is_gone(event.failure.worker if event.worker is None else event.worker, event.pid):
        return Decision(state, (), f"{name_of(event.worker)} (pid {event.pid}) counts as lost; its report is ignored")
    if is_kind_of(event.failure.kind, ReplicasDiffer):
        # All members tell the same; the first word is enough, and what comes later is of a generation that is no more.
        known = state.members.find(event.worker, event.pid)
        if known is None or known.within != event.generation:
            return Decision(state, (), f"{name_of(event.worker)} reports replicas that have been abandoned: ignored")
        return condemn(state, event.failure, now)
    known = state.members.find(event.worker)
    failure = event.failure
    if failure.worker is None:
        failure = failure.at(worker=event.worker)
    if known and failure.step is None:
        failure = failure.at(step=known.status.step, phase=failure.phase or known.status.phase)
    # Where there are servers, or each has a part of the state, no two of them apply the same.
    settings = state.members.settings
    is_comparable = not isinstance(state, Recalling) and not settings.servers and settings.mesh is None
    if known and failure.phase == APPLY and failure.is_repeatable and is_comparable:
        others = (other for other in state.members.enrolled if other.worker != known.worker)
        # Others apply the same step to the same state, and nobody has failed in it yet.
        if not known.is_ready and state.members.accused is None and any(other.has_trained for other in others):
            return _accuse(state, known, failure, now)
    # An error between two processes (one of them is the trouble, and neither knows which), or of this one alone.
    if not is_kind_of(failure.kind, LinkError, WorkerUnfit):
        return end(failure)
    reason = f"{name_of(failure.worker)} gives up; it is lost when it exits: {failure.message}"
    if failure.worker is not None:
        last_words = {**state.members.last_words, (failure.worker, event.pid): failure.message}
        disputed = Cursor() if is_kind_of(failure.kind, LanesDisputed) else state.members.disputed
        state = replace(state, members=replace(state.members, last_words=last_words, disputed=disputed))
    return Decision(state, (), reason)


def _accuse(state: Active, known: Enrolled, failure: Failure, now: float) -> Decision:
    """A worker could not apply a step. That ends the job if it is the same for the others, which they tell; where they
    could, it is the replica that is wrong."""
    last_words = {**state.members.last_words, known.process: failure.message}
    accusing: Active = replace(state, members=replace(state.members, accused=failure, last_words=last_words))
    if proof := proof_against(failure, accusing.members):
        return condemn(accusing, proof, now)
    return Decision(accusing, (), f"whether it is its replica is seen by the others: {failure.message}")


def on_exit_reported(state: Active, event: ExitReported, now: float) -> Decision:
    """The supervisor has reaped a process."""
    told = dict(state.members.last_words)
    # Who never registered may not have told its pid.
    last_words = [told.pop((event.worker, pid), "") for pid in (event.pid, 0)]
    members = replace(state.members, last_words=told)
    if event.exit_code == GAVE_UP and not members.is_gone(event.worker, event.pid):
        # It could not go on, and has told why: the first in a row, if it has completed a step.
        known = members.find(event.worker, event.pid)
        step = max(known.status.step or 0, event.status.step or 0) if known and not known.is_ready else 0
        # The step that a place tells is under way: the one after the generation's cursor is its first.
        in_a_row = 0 if step > members.cursor.step + 1 else members.given_up.get(event.worker, 0)
        members = replace(members, given_up={**members.given_up, event.worker: in_a_row + 1})
    return _after_exit(replace(state, members=members), event, next(filter(None, last_words), ""), now)


def _after_exit(state: Active, event: ExitReported, last_words: str, now: float) -> Decision:
    members, process = state.members, (event.worker, event.pid)
    known = members.find(event.worker, event.pid)
    is_missing = isinstance(state, Recalling) and process in state.missing
    # The coordinator before may have let it go.
    is_from_before = event.exit_code == LEFT and members.is_successor and (known is not None or is_missing)
    if event.exit_code == DIVERGED and (known is not None or is_missing or process in members.dismissed):
        # Its word has been lost; it has ended because nobody can trust what it holds, nor what the others do.
        failure = Failure(ReplicasDiffer.__name__, f"{name_of(event.worker)} has found that the replicas differ.")
        return condemn(state, failure, now, ended=process)
    # Of a group that ends as one, the loss of the first is told: it is one recovery, not one for each.
    is_with_group = event.exit_code == ENDED_WITH_ITS_GROUP
    if process in members.dismissed or is_from_before or is_with_group:
        return _see_off(state, event, now)
    failure = autopsy_of_exit(event, known, last_words, had_joined=is_missing)
    if known is not None:
        died = replace(state, members=replace(members, victims=with_victim(members.victims, event, known, last_words)))
        detect = now - members.suspicion.since if members.suspicion else 0.0
        return lose(died, known, failure, detect, now, is_reaped=True)
    if process in members.reaped | members.expelled:
        return _reap(state, event, now)
    if not is_missing and event.worker not in members.awaited:
        reaped: Active = replace(state, members=replace(members, reaped=members.reaped | {process}))
        return Decision(
            reaped, (), f"a process of {name_of(event.worker)} (pid {event.pid}) has ended, which is not a member"
        )
    reaped = replace(state, members=expel(members, {process}, reaped={process}))
    if isinstance(reaped, Recalling) and is_missing:
        reaped = without_missing(reaped, process)
    return fill_place(reaped, event.worker, failure, (loss_of(failure, 0.0, now),), now, is_vacant=True)


def _reap(state: Active, event: ExitReported, now: float) -> Decision:
    """One whose loss has been told is gone for sure: now its place is free."""
    members, process = state.members, (event.worker, event.pid)
    reason = f"{name_of(event.worker)} (pid {event.pid}), which counted as lost, is gone"
    if process in members.reaped and (members.stop is None or event.worker not in members.awaited):
        return Decision(state, (), reason)  # the answer to the first report was lost
    reaped = replace(state, members=expel(members, {process}, reaped={process}))
    return vacate(reaped, event.worker, (), reason, now)


def _see_off(state: Active, event: ExitReported, now: float) -> Decision:
    """One that was let go is gone, which is no failure; its place is for another, if there still is one."""
    process = (event.worker, event.pid)
    known = state.members.find(*process)
    reason = f"{name_of(event.worker)} (pid {event.pid}) has left"
    left: Active = replace(state, members=expel(state.members, {process}, reaped={process}))
    actions: tuple[Action, ...] = ()
    if isinstance(left, Recalling):
        left = without_missing(left, process)
    elif known is not None and isinstance(left, Training) and known.within == left.generation.id:
        left, actions = regroup(left, now)
    return vacate(left, event.worker, actions, reason, now)


# --- what a loss costs


def lose(state: Active, known: Enrolled, failure: Failure, detect: float, now: float, *, is_reaped: bool) -> Decision:
    """A registered worker is gone, or counts as gone: the others go on without it, and another takes its place.

    Its place is filled when its process has been reaped: until then it may still write somewhere.
    """
    before = state.members
    members = replace(
        expel(before, {known.process}, reaped={known.process} if is_reaped else ()),
        futile=0,
        # Who is expelled has not died of what it was doing.
        victims=before.victims if is_reaped else (),
        suspicion=None,
        is_explained=isinstance(state, Forming) or not known.is_ready,
        founders=_founders_without(known, before),
    )
    actions: tuple[Action, ...] = (loss_of(failure, detect, now),)
    if not is_reaped:
        actions = (*actions, Expel(*known.process))
    left: Active = replace(state, members=members)
    if isinstance(state, Training) and known.within == state.generation.id:
        left, regrouping = regroup(left, now)
        actions = (*actions, *regrouping)
    return fill_place(left, known.worker, failure, actions, now, is_vacant=is_reaped)


def _founders_without(known: Enrolled, before: Members) -> frozenset[int]:
    """Who still brings the newest checkpoint: the one that is lost may have saved after others have looked for one."""
    if known.is_ready and not known.has_trained:
        return before.founders
    # Those of a sharded gang are not started before everybody has left the last generation.
    is_early = before.settings.mesh is not None and not all(one.is_ready for one in before.enrolled)
    return before.founders & before.awaited if is_early else frozenset()


def condemn(state: Active, failure: Failure, now: float, ended: tuple[int, int] | None = None) -> Decision:
    """The replicas of a generation differ. Wrong gradients have been in everybody's sum, so nobody holds the state of
    the job any more: all are replaced, and go on from the newest checkpoint, which all members had agreed on.

    `ended` is the process whose end has told of it.
    """
    # All but those who have just what they came with; be it that somebody was left out since it trained. Where lanes
    # differ, which an exit code does not say, what somebody has restored may be of a checkpoint that is set aside.
    is_aside = ended is not None or is_kind_of(failure.kind, LanesDiffer)
    doomed = {
        known.process: known
        for known in state.members.enrolled
        if known.has_trained
        or not known.is_ready
        or known.cursor != (Cursor() if is_aside else known.registration.cursor)
    }
    processes = frozenset(doomed) | (state.missing if isinstance(state, Recalling) else frozenset())
    reaped = frozenset() if ended is None else frozenset({ended})
    members = replace(
        expel(state.members, processes, reaped),
        diverged=state.members.diverged + 1,
        is_condemned=True,
        disputed=None,
        # What others have found before may be older than what these have saved.
        founders=frozenset(),
        accused=None,
        futile=0,
        victims=(),
        suspicion=None,
        is_explained=True,
    )
    gone = {worker for worker, _ in processes}
    blamed = gone.intersection(failure.culprits) or gone
    losses = [
        loss_of(autopsy_of_divergence(failure, process, doomed.get(process)), 0.0, now)
        for process in sorted(processes)
        if process[0] in blamed
    ]
    if members.diverged > MOST_DIVERGED and members.stop is None:
        return end(autopsy_of_divergences(failure, members.diverged), *losses)
    if isinstance(state, Recalling):
        state = replace(state, missing=frozenset())
    left, regrouping = regroup(replace(state, members=members), now)
    actions = (*losses, *regrouping, *(Expel(*process) for process in sorted(processes - reaped)))
    reason = f"{failure.message} All go back to the newest checkpoint."
    if ended is not None:
        return vacate(left, ended[0], actions, reason, now)
    return form_if_ready(left, actions, reason, now)


def give_up_state(state: Active, failure: Failure, now: float) -> Decision:
    """A part of the state is held by nobody, as all members of a generation have found: servers, or all workers of a
    mesh, begin again from the newest checkpoint, if there is one, and other workers copy from servers. All members tell
    it; the first word is enough."""
    is_cut = state.members.settings.mesh is not None
    # Of a mesh nobody can stay: who has trained cannot go back to a state that is not stored, such as the first one.
    doomed = {known.process for known in state.members.keepers if is_cut or known.has_trained or not known.is_ready}
    if not doomed:
        return form_if_ready(*regroup(state, now), "what is lost has been given up already", now)
    members = replace(
        expel(state.members, doomed),
        # Or a job that loses it again and again without getting any further would never end.
        deaths=state.members.deaths + 1,
        founders=frozenset(),
        futile=0,
        suspicion=None,
        is_explained=True,
    )
    left, regrouping = regroup(replace(state, members=members), now)
    told = f"{failure.message} All go back to the newest checkpoint."
    actions = (warning(told, members.cursor.step, now), *regrouping, *(Expel(*process) for process in sorted(doomed)))
    return form_if_ready(left, actions, told, now)


def proof_against(accused: Failure, members: Members) -> Failure | None:
    """That the replica of a worker which could not apply a step differs: another, with the same to apply, could."""
    others = (known for known in members.enrolled if known.worker != accused.worker and known.is_ready)
    step = accused.step
    other = next((one for one in others if one.has_trained and step is not None and one.cursor.step >= step), None)
    if other is None:
        return None
    return Failure(
        ReplicasDiffer.__name__,
        f"{name_of(accused.worker).capitalize()} could not apply step {step}, and {name_of(other.worker)} could: their "
        f"replicas differ. {accused.message}",
        culprits=() if accused.worker is None else (accused.worker,),
    )


def fill_place(
    state: Active, worker: int, failure: Failure, actions: tuple[Action, ...], now: float, *, is_vacant: bool
) -> Decision:
    """Have another process take a place, unless the job is stopping, or too many have died for nothing."""
    members = state.members
    if isinstance(state, Training):
        members = replace(members, stillborn=members.stillborn + 1)
    else:
        members = replace(members, deaths=members.deaths + 1)
    if members.stop is None and (poison := find_poison(members.victims)):
        return end(poison, *actions)
    # Few before the first generation: what keeps them from starting once will do so again.
    allowed = 2 * (members.wanted + members.wanted_servers) + 3 if members.generations else 3
    if members.deaths > allowed and fills_places(members):
        return end(autopsy_of_futility(failure, members.deaths, len(members.enrolled), members.settings), *actions)
    left = replace(state, members=members)
    if not is_vacant:
        return form_if_ready(left, actions, failure.message, now)
    if members.stop is None and members.given_up.get(worker) == REPORTED_GIVEN_UP:
        told = _explain_giving_up(members, worker, failure.message)
        actions = (*actions, warning(told, members.cursor.step, now))
    return vacate(left, worker, actions, failure.message, now)


def vacate(state: Active, worker: int, actions: tuple[Action, ...], reason: str, now: float) -> Decision:
    """The process that had a place is gone for sure: another is started.

    Not where there is no such place any more, nor where the job is stopping.
    """
    members = state.members
    if worker in places(members) and fills_places(members):
        order = _refill(members, worker)
        left = replace(
            state,
            members=replace(
                members,
                founders=members.founders | {worker} if order.restore else members.founders,
                refills={**members.refills, worker: (now + order.after, order.restore)},
            ),
        )
        return form_if_ready(left, (*actions, order), reason, now)
    left = replace(state, members=replace(members, awaited=members.awaited - {worker}))
    is_over = worker in places(members) and isinstance(left, Forming) and holds_nothing(left.members)
    if members.stop is not None and is_over:
        return stopped(members.stop, actions, reason)
    return form_if_ready(left, actions, reason, now)


def _refill(members: Members, worker: int) -> Refill:
    """At once, and more slowly the longer nothing comes of it; from a checkpoint where nobody is sure to have more."""
    timing = members.settings.timing
    usual = members.wanted + members.wanted_servers
    excess = min(members.deaths + members.stillborn - usual, _MOST_DOUBLINGS)
    after = 0.0 if excess <= 0 else min(timing.failure_timeout, timing.heartbeat_every * 2**excess)
    if worker in members.given_up:
        after = max(after, _back_off(members.given_up[worker]))
    return Refill(worker, after, restore=not members.has_state)


def _back_off(times: int) -> float:
    """What one process in a place lacks the next may lack too, and each that comes costs the others a generation."""
    return 0.0 if times < 2 else min(LONGEST_BACK_OFF, 2.0 ** min(times - 2, _MOST_DOUBLINGS))


def _explain_giving_up(members: Members, worker: int, why: str) -> str:
    fewer, option, what = members.wanted - 1, "", "workers"
    if Role.of(worker) is Role.SERVER:
        fewer, option, what = members.wanted_servers - 1, "--servers ", "servers"
    resize = f", and `quorate resize RUN {option}{fewer}` uses fewer {what}" if fewer else ""
    if members.settings.mesh is not None:
        resize = ", and so do more shards"
    return (
        f"{REPORTED_GIVEN_UP} processes in a row have failed in the place of {name_of(worker)}, none with a completed"
        f" step. The last: {why.rstrip('.')}. The next is started in {_back_off(REPORTED_GIVEN_UP):.0f} s, the ones"
        f" after it later and later. If it lacks memory, a smaller batch_size needs less{resize}."
    )
