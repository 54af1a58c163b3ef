"""A coordinator that takes the place of another: it knows nobody, and learns from the workers how far the job is.

Until everybody who is there has come back, nothing is decided. If all members of the newest generation are still at
work in it, they go on as if nothing had happened. Otherwise it is over for all of them, and so is every older one: the
coordinator before may have told only some of its workers of the last.
"""

from dataclasses import replace

from quorate.coordinator.events import Action, Registered, Regroup
from quorate.coordinator.places import call_together, places, places_of
from quorate.coordinator.states import (
    Active,
    Ended,
    Enrolled,
    Forming,
    Handover,
    JobSettings,
    Members,
    Recalling,
    Recollection,
    State,
    Training,
)
from quorate.core.generation import Role
from quorate.observe.events import RunFinished


def take_over(settings: JobSettings, handover: Handover, recalled: Recollection, now: float) -> State:
    """The state to begin with, after what a predecessor has written down: the job goes on, or has ended already."""
    if isinstance(recalled.end, RunFinished):
        return Ended(None, recalled.end.result or {})  # it may not have been told
    if recalled.end is not None:
        return Ended(recalled.end.failure)
    if recalled.workers is not None:
        settings = replace(settings, workers=recalled.workers)
    if recalled.servers is not None:
        settings = replace(settings, servers=recalled.servers)
    # The launcher may not have read yet what the one before has written last.
    has_begun = handover.has_begun or recalled.has_begun
    return succeed(settings, replace(handover, has_begun=has_begun, is_condemned=recalled.is_condemned), now)


def succeed(settings: JobSettings, handover: Handover, now: float) -> Recalling:
    """The state of a coordinator that has just taken over."""
    generations = 1 if handover.has_begun else 0
    # The one before may have left a place empty for a number of workers that nobody else has heard of.
    everything = frozenset(places_of(settings.workers + settings.spares, settings.servers))
    empty = everything - {worker for worker, _ in handover.present}
    members = Members(
        settings,
        ticked=now,
        wanted=settings.workers,
        wanted_servers=settings.servers,
        awaited=(handover.awaited & everything) | empty,
        generations=generations,
        is_successor=True,
        is_condemned=handover.is_condemned,
    )
    return Recalling(members, now, handover.present)


def take_back(state: Active, event: Registered, now: float) -> Active:
    """A worker has come back, and says where it stands."""
    position = event.position
    assert position is not None, "whoever comes back reports its position"
    generation = position.generation
    returned = Enrolled(
        event,
        heard=now,
        moved=now,
        cursor=position.cursor,
        within=None if position.has_left or generation is None else generation.id,
        has_trained=position.has_trained,
        is_leaving=event.worker not in places(state.members),
    )
    founders = state.members.founders - {event.worker}
    members = replace(state.members.with_newcomer(returned), founders=founders)
    if not isinstance(state, Recalling):
        return replace(state, members=members)
    newest = state.newest
    if generation is not None and (newest is None or generation.id > newest.id):
        # Who stands before the cursor of a generation has not gone on from it.
        newest, members = generation, replace(members, cursor=max(members.cursor, generation.cursor))
    return replace(state, members=members, newest=newest, missing=state.missing - {(event.worker, event.pid)})


def without_missing(state: Recalling, process: tuple[int, int]) -> Recalling:
    """One that will not come back, which explains every link to it that broke; it may have saved a checkpoint last."""
    members = replace(state.members, is_explained=True, suspicion=None, founders=frozenset())
    return replace(state, members=members, missing=state.missing - {process})


def settled(state: Recalling, now: float) -> tuple[Forming | Training, tuple[Action, ...]]:
    """The state to go on with, now that nobody is missing any more."""
    newest = state.newest
    if newest is None:
        return Forming(state.members, since=now), ()
    ring = tuple(member.worker for member in newest.workers)
    retiring = {member.worker for member in newest.members if member.role is Role.RETIRING}
    members = replace(
        state.members,
        enrolled=tuple(
            replace(known, is_retiring=known.within == newest.id and known.worker in retiring)
            for known in state.members.enrolled
        ),
        generations=newest.id.number,
        cursor=newest.cursor,
        ring=ring,
        at_service=tuple(server.worker for server in newest.servers),
    )
    entered = {known.within for known in members.enrolled if known.within is not None}
    known = {one.worker: (one.within, one.registration.address) for one in members.enrolled}
    if any(known.get(member.worker) != (newest.id, member.address) for member in newest.members):
        return Forming(members, since=now), tuple(Regroup(each, at_boundary=False) for each in sorted(entered))
    # All its members are in it, as they were; what is older is over.
    older = (Regroup(each, at_boundary=False) for each in sorted(entered - {newest.id}))
    at_work = Training(members, newest)
    return at_work, (*older, *call_together(at_work))


def is_expected(state: Active, worker: int, pid: int) -> bool:
    """Whether a process that is not known was known, or may have been, to the coordinator before this one."""
    if not state.members.is_successor or state.members.find(worker) is not None:
        return False
    is_missing = isinstance(state, Recalling) and (worker, pid) in state.missing
    is_gone = state.members.is_gone(worker, pid)
    return is_missing or (worker in state.members.awaited and not is_gone)
