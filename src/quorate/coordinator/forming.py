"""Forming a generation: ending the last one, waiting until everybody stands ready, and declaring the next."""

from collections.abc import Sequence
from dataclasses import replace

from quorate.coordinator.autopsy import autopsy_of_links, warning
from quorate.coordinator.events import Action, DeclareGeneration, EndJob, Expel, Regroup
from quorate.coordinator.places import (
    call_to_save,
    dismiss,
    expel,
    must_hand_over,
    places,
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
    Members,
    Recalling,
    Suspicion,
    Training,
    WeakLink,
)
from quorate.coordinator.succession import settled
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
from quorate.observe.events import LogMessage, RolledBack

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
    is_deserted = not members.enrolled and not members.awaited
    is_over = (members.generations and holds_nothing(members)) or is_deserted or is_stranded(members)
    if members.stop is not None and is_over:
        # There is nothing to save that is not saved: to begin once more would only take the job back.
        return stopped(members.stop, actions, reason)
    waiting = _waits_for(members)
    if waiting:
        return Decision(state, actions, f"{reason}; {waiting}")
    # The first generation begins with what its workers were started with. After that somebody holds the state, or has
    # looked for the newest checkpoint since nobody does: whoever was started before would silently take the job back.
    has_founder = any(known.worker in members.founders and not known.is_leaving for known in members.keepers)
    is_sound = not members.generations or members.has_state or has_founder
    if is_sound and (stuck := _cannot_begin_again(members)):
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
    generation = Generation(number, (*workers, *servers), _find_restored(members, taking_part))
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
    at_work = {member.worker for member in generation.members}
    retiring = {member.worker for member in generation.members if member.role is Role.RETIRING}
    # Steps that only servers which are gone had completed are done again, and asynchronously to other results.
    is_back = members.is_condemned or bool(generation.servers and members.generations and not members.has_state)
    is_back = is_back or bool(members.generations and generation.restored is not None)
    rollback = (RolledBack(step=generation.cursor.step, time=now),) if is_back else ()
    members = replace(
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
        formed=now,
        furthest=max(members.furthest, generation.cursor),
        ring=chosen.ring,
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
        futile=futile,
        futile_since=futile_since,
        suspicion=None,
        is_explained=False,
    )
    count = f"{len(generation.workers)} of {members.wanted} workers"
    count += f" and {len(generation.servers)} of {members.wanted_servers} servers" if members.settings.servers else ""
    begins = f"generation {generation.id} begins with {count} at step {generation.cursor.step}"
    warnings = (warning(sentence, generation.cursor.step, now) for sentence in told)
    begun = Training(members, generation)
    saving = call_to_save(begun) if any(known.is_leaving for known in members.enrolled) else ()
    if retiring and not saving:
        # What it holds is taken over before the first step: after that it may go.
        saving = (Regroup(generation.id, at_boundary=True),)
    return Decision(
        begun,
        (*actions, *warnings, *rollback, DeclareGeneration(generation), *saving),
        "; ".join((reason, *(sentence.rstrip(".") for sentence in told), begins)),
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
