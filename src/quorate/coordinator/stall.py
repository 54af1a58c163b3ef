"""Steps that take too long: who holds them up, and what everybody is doing.

A worker that is alive but gets nowhere sends its heartbeats all the same. It is reported once; it counts as lost only
if the user has set `step_timeout`, since nobody else knows how long a step may take.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quorate.coordinator.autopsy import WORKER_LOST, name_enrolled
from quorate.coordinator.events import Place
from quorate.coordinator.states import Crew, Enrolled
from quorate.coordinator.terms import Terms
from quorate.core.failure import Failure

PATIENCE = 30.0
"""Seconds before a step is reported, or so many times what the one before it took."""
TIMES_USUAL = 10

_EXCHANGE = "exchange"
_USER_CODE = {"data": "reading its data", "compute": "computing its lanes"}
_STEP = frozenset({*_USER_CODE, _EXCHANGE, "apply"})


@dataclass(frozen=True)
class Stall:
    """A step in which nobody has come any further for `seconds`, and the one who holds it up."""

    step: int
    seconds: float
    culprit: Enrolled
    message: str

    def failure(self, step_timeout: float) -> Failure:
        """Why the culprit counts as lost."""
        message = f"{self.message} That is longer than step_timeout ({step_timeout})."
        place = self.culprit.place
        return Failure(WORKER_LOST, message, worker=self.culprit.worker, step=place.step, phase=place.phase)


def at_place(known: Enrolled, place: Place, now: float) -> Enrolled:
    """A worker that tells where it is: since when it is at that step, and how long the one before it took."""
    before = known.place
    in_steps = _in_step(before) and _in_step(place)
    if in_steps and before.step == place.step:
        return replace(known, place=place)
    steps = (place.step or 0) - (before.step or 0)
    took = (now - known.moved) / steps if in_steps and steps > 0 else known.usual
    return replace(known, place=place, moved=now, usual=took)


def find_stall(crew: Crew, now: float) -> Stall | None:
    """The step that has taken too long, if it has; evaluations, checkpoints and copies take what they take.

    A generation that is over waits for those who are still in a step of it.
    """
    members = [known for known in crew.enrolled if not known.is_ready]
    if not members or not all(_in_step(known.place) for known in members):
        return None
    seconds = now - max(known.moved for known in members)
    if seconds < _limit(crew.terms, members):
        return None
    holding_up = [known for known in members if known.place.phase != _EXCHANGE]
    # Where all wait for each other, any of them may be the trouble: going on without one makes new links.
    culprit = holding_up[0] if holding_up else members[-1]
    step = min(known.place.step or 0 for known in members)
    return Stall(step, seconds, culprit, _sentence(step, seconds, members, holding_up))


def _limit(terms: Terms, members: Sequence[Enrolled]) -> float:
    if terms.step_timeout is not None:
        return terms.step_timeout
    return max(PATIENCE, TIMES_USUAL * max(known.usual for known in members))


def _in_step(place: Place) -> bool:
    return place.phase in _STEP


def _sentence(step: int, seconds: float, members: Sequence[Enrolled], holding_up: Sequence[Enrolled]) -> str:
    doing = ", ".join(f"{name_enrolled(known)} is in {known.place.phase}" for known in members)
    if not holding_up:
        why = "all wait for each other, so the links between them are stuck"
    else:
        who = ", ".join(f"worker {known.worker}" for known in holding_up)
        what = {_USER_CODE.get(known.place.phase, "applying the update") for known in holding_up}
        code = "the task's own code" if all(known.place.phase in _USER_CODE for known in holding_up) else "its code"
        why = f"{who} is held up in {code} ({' and '.join(sorted(what))})"
    return f"step {step} has not come any further for {seconds:.1f} s: {doing}; {why}."
