"""Forming a generation: ending the last one, waiting until everybody stands ready, and declaring the next.

A coordinator that takes the place of another knows nobody, and learns from the workers how far the job is. Until
everybody who is there has come back, nothing is decided. If all members of the newest generation are still at work in
it, they go on as if nothing had happened. Otherwise it is over for all of them, and so is every older one: the
coordinator before may have told only some of its workers of the last.
"""

from collections.abc import Sequence
from dataclasses import replace

from quorate.coordinator.autopsy import autopsy_of_links, warning
from quorate.coordinator.events import Action, DeclareGeneration, EndJob, Expel, Registered, Regroup
from quorate.coordinator.places import (
    call_to_save,
    call_together,
    dismiss,
    expel,
    must_hand_over,
    places,
    places_of,
    serving,
    taking_part,
)
from quorate.coordinator.speed import share_lanes
from quorate.coordinator.states import (
    Active,
    Decision,
    Ended,
    Enrolled,
    Forming,
    Handover,
    JobSettings,
    Members,
    Recalling,
    Recollection,
    State,
    Suspicion,
    Training,
    WeakLink,
)
from quorate.coordinator.weak_links import (
    LineUp,
    are_neighbours,
    blame_link,
    explain_line_up,
    explain_stuck,
    is_bad,
    line_up,
)
from quorate.core.failure import Failure
from quorate.core.generation import Cursor, Generation, GenerationId, Member, Role, common_cursor, name_of, names_of
from quorate.observe.events import LogMessage, RolledBack, RunFinished


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


# --- the next generation

MOST_FUTILE = 3
"""So many generations in a row may break without a loss and without a step, however long that takes."""


def end(failure: Failure, *before: Action) -> Decision:
    """The job is over."""
    return Decision(Ended(failure), (*before, EndJob(failure)), failure.message)


def stopped(why: str, actions: tuple[Action, ...], reason: str) -> Decision:
    """The job is over as somebody has asked."""
    result = {"ending": why}
    return Decision(Ended(None, result), (*actions, EndJob(None, "", result)), f"{reason}; stopped: {why}")


def holds_nothing(members: Members) -> bool:
    """Whether nobody has the state of the job, nor comes out of a generation perhaps with it."""
    return not members.has_state and all(known.is_ready for known in members.enrolled)


def is_stranded(members: Members) -> bool:
    """Whether servers hold the state of a job that stops, and no worker is left that could lead them to a save."""
    left = {*members.awaited, *(known.worker for known in members.enrolled)}
    has_workers = any(Role.of(one) is Role.WORKER for one in left)
    return members.has_state and not has_workers and all(known.is_ready for known in members.enrolled)


def regroup(state: Active, now: float) -> tuple[Active, tuple[Action, ...]]:
    """End the generation that is at work, if there is one: its members report where they stand."""
    if not isinstance(state, Training):
        return state, ()
    return Forming(state.members, since=now), (Regroup(state.generation.id, at_boundary=False),)


def form_if_ready(state: Active, actions: tuple[Action, ...], reason: str, now: float) -> Decision:
    """Begin the next generation if everybody who is to take part stands ready."""
    if isinstance(state, Recalling):
        if state.missing:
            return Decision(state, actions, f"{reason}; {len(state.missing)} have not come back yet")
        state, recalled = settled(state, now)
        actions = (*actions, *recalled)
    members = state.members
    if any(known.is_leaving for known in members.enrolled):
        members, dismissals = dismiss(members, is_training=isinstance(state, Training))
        state, actions = replace(state, members=members), (*actions, *dismissals)
    if isinstance(state, Training):
        return Decision(state, actions, reason)
    if members.stop is not None:
        is_deserted = not members.enrolled and not members.awaited
        if (members.generations and holds_nothing(members)) or is_deserted or is_stranded(members):
            # There is nothing to save that is not saved: to begin once more would only take the job back.
            return stopped(members.stop, actions, reason)
    waiting = _waits_for(members)
    if waiting:
        return Decision(state, actions, f"{reason}; {waiting}")
    # The first generation begins with what its workers were started with. After that somebody holds the state, or has
    # looked for the newest checkpoint since nobody does: whoever was started before would silently take the job back.
    has_founder = any(known.worker in members.founders and not known.is_leaving for known in members.keepers)
    is_sound = not members.generations or members.has_state or has_founder
    if is_sound and members.settings.mesh is not None and (stuck := _cannot_begin_again(members)):
        told = (
            "a part of the state is lost, and no checkpoint exists: other processes in the place of"
            f" {names_of(known.worker for known in stuck)} begin again"
        )
        return _make_room(state, stuck, told, actions, reason, now)
    return (_form if is_sound else _begin_from_checkpoint)(state, actions, reason, now)


def _form(state: Forming, actions: tuple[Action, ...], reason: str, now: float) -> Decision:
    """Begin the next generation with those who are here, in their order, and with the lanes that each hosts."""
    members, blamed = blame_link(state.members) if state.members.suspicion else (state.members, None)
    chosen = line_up(members, now)
    generation = _generation_of(members, chosen)
    is_treated = blamed is not None and is_bad(blamed) and not _is_stuck(blamed, chosen)
    # Further than ever: who begins again from a checkpoint comes past old steps each time, and dies where others did.
    advanced = generation.cursor > members.furthest or members.generations == 0
    futile = 0 if advanced or is_treated else members.futile + (1 if members.suspicion else 0)
    futile_since = members.futile_since if members.futile else now
    is_lasting = futile > MOST_FUTILE and now - futile_since >= members.settings.timing.storm
    if is_lasting and members.suspicion is not None:
        symptom = _last_symptom(members, members.suspicion, blamed)
        return end(autopsy_of_links(symptom, futile, now - futile_since), *actions)
    told = explain_line_up(members, blamed, chosen) if members.links else []
    if members.generations and not members.has_state and not generation.cursor.step:
        # Nobody shall wonder where its steps have gone.
        again = "no worker holds the state of the job any longer, and there is no checkpoint: it restarts at step 1."
        told.insert(0, again)
    # Steps that only servers which are gone had completed are done again, and asynchronously to other results.
    is_back = members.is_condemned or bool(generation.servers and members.generations and not members.has_state)
    is_back = is_back or bool(members.generations and generation.restored is not None)
    rollback = (RolledBack(step=generation.cursor.step, time=now),) if is_back else ()
    members = replace(
        _at_work(members, generation, advanced=advanced),
        formed=now,
        ring=chosen.ring,
        futile=futile,
        futile_since=futile_since,
    )
    count = f"{len(generation.workers)} of {members.wanted} workers"
    count += f" and {len(generation.servers)} of {members.wanted_servers} servers" if members.settings.servers else ""
    begins = f"generation {generation.id} begins with {count} at step {generation.cursor.step}"
    warnings = (warning(sentence, generation.cursor.step, now) for sentence in told)
    begun = Training(members, generation)
    saving = call_to_save(begun) if any(known.is_leaving for known in members.enrolled) else ()
    if not saving and any(member.role is Role.RETIRING for member in generation.members):
        # What it holds is taken over before the first step: after that it may go.
        saving = (Regroup(generation.id, at_boundary=True),)
    return Decision(
        begun,
        (*actions, *warnings, *rollback, DeclareGeneration(generation), *saving),
        "; ".join((reason, *(sentence.rstrip(".") for sentence in told), begins)),
    )


def _generation_of(members: Members, chosen: LineUp) -> Generation:
    """The next one: workers in their order, each with the lanes that it hosts, then servers."""
    taking_part = [known for worker in chosen.ring if (known := members.find(worker)) is not None]
    workers = (
        Member(
            known.worker,
            known.registration.address,
            lanes,
            known.registration.local_address,
            known.cursor,
            part=members.settings.part(known.worker),
        )
        for known, lanes in zip(taking_part, share_lanes(members, taking_part), strict=True)
    )
    servers = (
        Member(one.worker, one.registration.address, range(0), one.registration.local_address, one.cursor, role)
        for one, role in serving(members)
    )
    number = GenerationId(members.settings.incarnation, members.generations + 1)
    return Generation(number, (*workers, *servers), _find_restored(members, taking_part))


def _at_work(members: Members, generation: Generation, *, advanced: bool) -> Members:
    """The members once it has begun; `advanced`: at a step that none before it has begun with."""
    at_work = {member.worker for member in generation.members}
    retiring = {member.worker for member in generation.members if member.role is Role.RETIRING}
    return replace(
        members,
        enrolled=tuple(
            # Who is behind has the state only when it has copied it, which its next report tells.
            replace(
                known,
                within=generation.id,
                has_trained=(known.has_trained and generation.restored is None) or known.cursor == generation.cursor,
                is_saved=False,
                is_retiring=known.worker in retiring,
            )
            if known.worker in at_work
            # Who is left out goes on waiting, while the others leave behind what it holds.
            else replace(known, has_trained=False)
            for known in members.enrolled
        ),
        generations=generation.id.number,
        cursor=generation.cursor,
        furthest=max(members.furthest, generation.cursor),
        at_service=tuple(member.worker for member in generation.servers),
        deaths=0 if advanced else members.deaths,
        diverged=0 if advanced else members.diverged,
        is_condemned=False,
        accused=None,
        # Until a generation begins after the step of the dispute, since another may break before it is settled.
        disputed=generation.cursor if members.disputed in (Cursor(), generation.cursor) else None,
        stillborn=0,
        # Those of a step that nobody has completed since.
        victims=tuple(victim for victim in members.victims if victim.step > generation.cursor.step),
        suspicion=None,
        is_explained=False,
    )


def _find_restored(members: Members, taking_part: Sequence[Enrolled]) -> Cursor | None:
    """The checkpoint that a sharded gang goes back to where a part of its state is held by nobody, or not at the cursor
    of the others; None where there is no need.

    Of several that were found it is the newest: an older one may have been removed by now, and this one has been read.
    """
    if members.settings.mesh is None or members.has_state:
        return None
    brought = taking_part
    if members.generations:
        brought = [known for known in taking_part if known.worker in members.founders]
    elif common_cursor((members.settings.part(known.worker), known.cursor) for known in brought) is not None:
        return None
    return max(known.cursor for known in brought)


def _cannot_begin_again(members: Members) -> tuple[Enrolled, ...]:
    """Those of a sharded gang that have come further than its beginning, where all have to go back to that: nobody
    keeps the state that a job begins with, so that only a process which has just begun has it."""
    here = taking_part(members)
    if _find_restored(members, here) != Cursor():
        return ()
    return tuple(known for known in here if known.cursor != Cursor())


def _begin_from_checkpoint(state: Forming, actions: tuple[Action, ...], reason: str, now: float) -> Decision:
    """One holds nothing, and makes room for another that begins from the newest checkpoint; the rest copy from that."""
    first = min(state.members.keepers, key=lambda known: (known.has_trained, known.worker))
    told = (
        "no worker holds the state of the job any longer: another process in the place of"
        f" {name_of(first.worker)} looks for the newest checkpoint"
    )
    return _make_room(state, (first,), told, actions, reason, now)


def _make_room(
    state: Forming, some: Sequence[Enrolled], told: str, actions: tuple[Action, ...], reason: str, now: float
) -> Decision:
    """Have these replaced. They are killed rather than asked: one that does not answer would be waited for forever."""
    processes = {known.process for known in some}
    left = replace(state, members=expel(state.members, processes), since=now)
    inform = LogMessage(step=left.members.cursor.step, time=now, level="info", message=f"{told}.")
    expulsions = (Expel(*process) for process in sorted(processes))
    return Decision(left, (*actions, inform, *expulsions), f"{reason}; {told}")


def _is_stuck(link: WeakLink, chosen: LineUp) -> bool:
    """Whether the next generation has a bad link just like the last."""
    takes_part = {*chosen.ring, *(one for one in link.pair if Role.of(one) is Role.SERVER)}
    return takes_part.issuperset(link.pair) and (not link.apart_helps or are_neighbours(link.pair, chosen.ring))


def _last_symptom(members: Members, suspicion: Suspicion, blamed: WeakLink | None) -> Failure:
    """What was heard first, since the rest may be its consequences; without its peer, which is told in words."""
    failure = suspicion.symptoms[0].at(peer=None)
    if blamed is None or not is_bad(blamed):
        return failure
    return failure.at(message=f"{failure.message.rstrip('.')}; {explain_stuck(members, blamed)}.")


def _waits_for(members: Members) -> str:
    """What the next generation waits for; empty when it need not wait."""
    busy = [known.worker for known in members.enrolled if not known.is_ready]
    if busy:
        return f"{names_of(busy)} must leave the last generation first"
    here, servers = len(taking_part(members)), len(serving(members))
    # Without anybody who holds the state, all begin together; otherwise those who can go on do. Once there was a state,
    # those who are on their way bring it back from a checkpoint: a spare that is here holds just a beginning.
    coming = members.awaited | ({worker for worker, _ in members.dismissed} & set(places(members)))
    is_short = here < members.wanted or servers < members.wanted_servers
    if coming and not members.has_state and (is_short or members.generations):
        beside = f" and {servers} of {members.wanted_servers} servers" if members.settings.servers else ""
        return f"{here} of {members.wanted} workers{beside} are here"
    if members.settings.servers and not servers:
        return "no server is here"
    # To stop, those who are left suffice: nobody else will come. Nor does anybody come to the places of those who leave
    # before they have handed over.
    is_last_act = members.stop is not None or must_hand_over(members)
    least = members.settings.least_workers
    needed = 1 if is_last_act and members.settings.mesh is None else least
    if here < max(1, needed):
        return f"{here} workers are here, and min_workers is {least}"
    if members.disputed is not None and here < min(2, members.wanted) and not is_last_act:
        return "another worker must come, to compute a lane that two have computed to other bits"
    return ""
