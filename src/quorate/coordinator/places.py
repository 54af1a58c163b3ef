"""The places of a job: how many there are, who takes part, who is a spare, and who leaves.

There is a place for each worker that is wanted, for each spare, and for each server. A spare is a worker that is
enrolled like the others, with its model built, and waits: a generation takes as many as are wanted, those first who
hold the state of the job. Whoever leaves does so between two generations, and hands over first: to those who stay or,
where nobody stays who holds the state, to a checkpoint.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quorate.coordinator.events import (
    Action,
    Dismiss,
    ExitReported,
    GrantLease,
    MembershipEvent,
    RecordEvents,
    Regroup,
    StateReported,
)
from quorate.coordinator.states import Active, Decision, Ended, Enrolled, Members, Recalling, State, Training
from quorate.core.failure import Failure
from quorate.core.generation import Cursor, Role, server_id


def places(members: Members) -> tuple[int, ...]:
    """Every place that is to be filled."""
    return places_of(members.wanted + members.settings.spares, members.wanted_servers)


def places_of(workers: int, servers: int) -> tuple[int, ...]:
    """The ids of so many workers and servers."""
    return (*range(workers), *map(server_id, range(servers)))


def taking_part(members: Members) -> list[Enrolled]:
    """Which workers make up the next generation if nothing speaks against it, by their ids."""
    workers, hands_over = [known for known in members.enrolled if not known.is_server], must_hand_over(members)
    if members.settings.mesh is not None:
        # Each in the place of its number. Who leaves takes part once more, where only a save keeps what it holds.
        chosen = [known for known in workers if not known.is_leaving or hands_over]
        return sorted(chosen, key=lambda known: known.worker)
    staying = sorted((known for known in workers if not known.is_leaving), key=lambda known: known.worker)
    # Those first who need not copy anything and are at work already; else those who have most to begin with.
    staying.sort(key=lambda known: Cursor() if known.has_trained else known.cursor, reverse=True)
    staying.sort(key=lambda known: known.is_ready and not known.has_trained)
    chosen = staying[: members.wanted]
    if hands_over and members.settings.servers:
        # Servers save what they hold at a step boundary, to which workers lead: also those who leave themselves.
        chosen = chosen or sorted(workers, key=lambda known: known.worker)[: members.wanted]
    elif hands_over:
        leaving = sorted(_holders(members), key=lambda known: known.worker)
        # Those who stay copy from one who leaves, for as long as that takes; unless it would host no lane.
        chosen = (
            [leaving[0], *staying[: min(members.wanted, members.settings.lanes - 1)]]
            if staying
            else leaving[: members.wanted]
        )
    return sorted(chosen, key=lambda known: known.worker)


def serving(members: Members) -> list[tuple[Enrolled, Role]]:
    """Which servers take part in the next generation, and as what, by their ids.

    One that leaves takes part once more, and the others take over what it holds; if no other is there, it serves until
    that is saved.
    """
    servers = sorted((known for known in members.enrolled if known.is_server), key=lambda known: known.worker)
    staying = [known for known in servers if not known.is_leaving]
    if not staying:
        return [(known, Role.SERVER) for known in servers] if must_hand_over(members) else []
    return [
        (known, Role.RETIRING if known.is_leaving else Role.SERVER)
        for known in servers
        if not known.is_leaving or owes_blocks(known)
    ]


def owes_blocks(known: Enrolled) -> bool:
    """Whether a server that leaves may hold something that no other has."""
    return known.is_server and known.is_leaving and known.has_trained and not known.has_retired


def must_hand_over(members: Members) -> bool:
    """Whether the state would be lost with those who leave, because nobody else holds it.

    Where nobody is there to copy it a checkpoint is enough.
    """
    if not any(known.is_leaving for known in members.enrolled):
        return False
    if members.settings.mesh is not None:
        staying = [known for known in members.enrolled if not known.is_leaving]
        is_kept = members.is_held_by(staying) or any(known.is_saved for known in members.enrolled)
        return members.has_state and not is_kept
    holders = _holders(members)
    if not holders or not all(known.is_leaving for known in holders):
        return False
    if members.settings.servers:
        # One of them has committed what all have written.
        return not any(known.is_saved for known in members.enrolled)
    can_be_copied = members.settings.lanes > 1 and any(not known.is_leaving for known in members.enrolled)
    return can_be_copied or not any(known.is_saved for known in holders)


def _holders(members: Members) -> list[Enrolled]:
    """Who holds the state of the job: those at work, or, where all have told how far they are, the furthest. Servers
    hold it together: one that is behind by a step has blocks that no other has."""
    trained = [known for known in members.keepers if known.has_trained]
    if members.settings.servers or not all(known.is_ready for known in members.enrolled):
        return trained
    return [known for known in trained if known.cursor == max(one.cursor for one in trained)]


def expel(
    members: Members, processes: Collection[tuple[int, int]], reaped: Collection[tuple[int, int]] = ()
) -> Members:
    """Without these processes, for good; others are awaited in their places, and have links of their own.

    Until they have been `reaped` they may still write somewhere, so that nobody is started in their places before.
    """
    gone = {worker for worker, _ in processes}
    return replace(
        members,
        enrolled=tuple(known for known in members.enrolled if known.process not in processes),
        expelled=(members.expelled | set(processes)) - set(reaped),
        reaped=members.reaped | set(reaped),
        dismissed=members.dismissed - set(reaped),
        awaited=members.awaited | (gone & set(places(members))),
        links=tuple(link for link in members.links if not gone & set(link.pair)),
    )


def call_together(state: Active) -> tuple[Action, ...]:
    """End the generation at work at the next step boundary, if another would be made up differently."""
    if not isinstance(state, Training):
        return ()
    at_work = {(member.worker, member.role) for member in state.generation.members}
    workers = {(known.worker, Role.WORKER) for known in taking_part(state.members)}
    servers = {(known.worker, role) for known, role in serving(state.members)}
    # What a server that leaves holds is taken over before the first step: there is nothing to wait for after that.
    is_final = any(member.role is Role.RETIRING for member in state.generation.members)
    if at_work == workers | servers and not is_final:
        return call_to_save(state)
    return (Regroup(state.generation.id, at_boundary=True, saves=must_hand_over(state.members)),)


def call_to_save(state: Training) -> tuple[Action, ...]:
    """End the generation at work at the next step boundary with a checkpoint, if its members have nobody but that."""
    return (Regroup(state.generation.id, at_boundary=True, saves=True),) if must_hand_over(state.members) else ()


def mark_leaving(members: Members, workers: Collection[int]) -> Members:
    """These leave as soon as they can."""
    enrolled = tuple(
        replace(known, is_leaving=known.is_leaving or known.worker in workers) for known in members.enrolled
    )
    return replace(members, enrolled=enrolled)


def dismiss(members: Members, *, is_training: bool) -> tuple[Members, tuple[Action, ...]]:
    """Let those go who want to leave and can: they are in no generation, and others hold the state, or a checkpoint.

    Between two generations not before everybody has left the last: whoever has not may be dead.
    """
    stays = any(known.is_server and not known.is_leaving for known in members.enrolled)
    going = [
        known
        for known in members.enrolled
        if known.is_leaving and known.is_ready and not (stays and owes_blocks(known))
    ]
    is_safe = is_training or (all(known.is_ready for known in members.enrolled) and not must_hand_over(members))
    if not going or not is_safe:
        return members, ()
    processes = frozenset(known.process for known in going)
    gone = {known.worker for known in going}
    suspicion = members.suspicion
    if suspicion is not None:
        symptoms = tuple(told for told in suspicion.symptoms if not gone & {told.worker, told.peer})
        suspicion = replace(suspicion, symptoms=symptoms) if symptoms else None
    left = replace(
        members,
        enrolled=tuple(known for known in members.enrolled if known not in going),
        dismissed=members.dismissed | processes,
        links=tuple(link for link in members.links if not gone & set(link.pair)),
        suspicion=suspicion,
    )
    return left, tuple(Dismiss(*process) for process in sorted(processes))


def fills_places(members: Members) -> bool:
    """Whether another process takes a place that is vacant. Where a job stops, only if a sharded gang could not save
    what it holds without."""
    return members.stop is None or (members.settings.mesh is not None and members.has_state)


def resized(members: Members, workers: int, servers: int) -> Members:
    """With another number of processes: new places are awaited, and whoever has one that is no more leaves."""
    members = replace(members, wanted=workers, wanted_servers=servers)
    taken = {known.worker for known in members.enrolled} | {
        worker for worker, _ in members.expelled | members.dismissed
    }
    awaited = (members.awaited | (set(places(members)) - taken)) & set(places(members))
    surplus = [known.worker for known in members.enrolled if known.worker not in places(members)]
    return mark_leaving(replace(members, awaited=frozenset(awaited)), surplus)


# --- what the supervisor has to know: how the job ended, whom to kill, which places to fill, and when


@dataclass(frozen=True)
class Outcome:
    """How a job ended: with a failure, or with a result."""

    failure: Failure | None
    result: dict[str, Any]


@dataclass(frozen=True)
class Vacancy:
    """A place to be filled after so many seconds; by one that restores the newest checkpoint, if nobody has state."""

    after: float
    restore: bool


@dataclass(frozen=True)
class News:
    """How the job ended, if it has; which processes count as lost, until they have been reaped; which places are to be
    filled; and how many workers the job has now."""

    outcome: Outcome | None
    expelled: tuple[tuple[int, int], ...] = ()
    vacant: Mapping[int, Vacancy] = field(default_factory=dict)
    workers: int = 0

    def is_new_to(self, workers: int) -> bool:
        """Whether there is anything to do for a supervisor to whose knowledge the job has so many workers."""
        return bool(self.outcome or self.expelled or self.vacant) or workers not in (0, self.workers)


def wakes(event: MembershipEvent, decision: Decision) -> bool:
    """Whether those who wait for news look again: not after every heartbeat."""
    is_notable = any(not isinstance(action, GrantLease | RecordEvents) for action in decision.actions)
    return is_notable or isinstance(event, ExitReported | StateReported)


def news_of(state: State, processes: Collection[tuple[int, int]], now: float) -> News:
    """What there is to know for a supervisor that has these processes, or will have them, with the pid 0."""
    if isinstance(state, Ended):
        return News(Outcome(state.failure, dict(state.result)))
    members = state.members
    # Not before everybody has come back: one would be started from a checkpoint that nobody needs, and a damaged one
    # would end the job.
    is_incomplete = isinstance(state, Recalling) and bool(state.missing)
    vacant = {} if is_incomplete else _vacancies(members, processes, now)
    if members.stop is not None:
        # Where a job stops, places stay empty; unless servers hold its state and lack a worker to lead them to a save,
        # or a sharded gang that is not full does.
        has_workers = any(not known.is_server for known in members.enrolled)
        is_led = not (members.settings.servers and members.has_state) or has_workers
        if is_led and not fills_places(members):
            vacant = {}
        vacant = {one: vacancy for one, vacancy in vacant.items() if Role.of(one) is Role.WORKER}
    return News(None, tuple(sorted(members.expelled)), vacant, members.wanted)


def _vacancies(members: Members, processes: Collection[tuple[int, int]], now: float) -> dict[int, Vacancy]:
    """Places that nobody is on the way to, as far as the supervisor knows.

    By processes, not by places: what the supervisor knew when it asked may be reaped by now.
    """
    taken = {worker for worker, _ in (set(processes) - members.reaped) | members.expelled}
    vacant = {}
    # Whoever is still in a generation may save, and what is looked for is the newest checkpoint.
    is_settled = members.settings.mesh is None or all(known.is_ready for known in members.enrolled)
    for worker in sorted(members.awaited - taken):
        # By the order, not by the state now: who may begin where nobody holds the state was decided with it. But where
        # somebody has come back with the state since, nobody begins.
        due, restore = members.refills.get(worker, (now, True))
        restore = restore and not members.has_state
        if is_settled or not restore:
            vacant[worker] = Vacancy(max(0.0, due - now), restore)
    return vacant
