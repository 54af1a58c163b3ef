"""What the supervisor has to know of a job: how it ended, whom to kill, which places to fill, and when."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from quorate.coordinator.actions import GrantLease, RecordEvents
from quorate.coordinator.events import ExitReported, MembershipEvent, StateReported
from quorate.coordinator.places import fills_places
from quorate.coordinator.states import Decision, Ended, Members, Recalling, State
from quorate.core.failure import Failure
from quorate.core.generation import Role


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
