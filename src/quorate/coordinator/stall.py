"""Work that stands still: who holds it up, what everybody is doing, and when that is too long.

A worker that is alive but gets nowhere sends its heartbeats all the same. They tell its phase, what it waits for, and a
number that changes whenever it comes any further: a lane, an evaluation batch, a piece of a copy or of a save. Where
nobody in a generation comes any further, that is reported; if it lasts, whoever holds the others up counts as lost.
Every phase is watched. Before a worker registers it is in no generation: its setup is the supervisor's to watch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from quorate.coordinator.autopsy import WORKER_LOST, name_enrolled
from quorate.coordinator.events import Place
from quorate.coordinator.states import Active, Crew, Enrolled, Forming, Hangs, Training
from quorate.core.failure import Failure
from quorate.core.worker_status import (
    APPLY,
    CHECKPOINT,
    COMPUTE,
    COPY,
    DATA,
    DISK,
    EVALUATION,
    EXCHANGE,
    JOIN,
    OTHERS,
    REGROUP,
    WAITING,
)

PATIENCE = 30.0
"""Seconds without progress before it is reported, or so many times the longest that the phase has taken so far."""
TIMES_USUAL = 10
LONGEST_STALL = 30 * 60.0
"""Seconds without progress before somebody counts as lost, or so many times the longest of any phase so far."""
TIMES_LONGEST = 100
MOST_HANGS = 3
"""In so many generations in a row workers may hang in the same phase of the same step."""

_MEETINGS = (EXCHANGE, JOIN)
_USER_CODE = {DATA: "reading its data", COMPUTE: "computing its lanes", EVALUATION: "evaluating a batch"}
_DOING = {
    APPLY: "applying the update",
    CHECKPOINT: "saving",
    COPY: "preparing the copy of its state",
    REGROUP: "leaving its generation",
    WAITING: "entering its generation",
}
_WHAT = {
    EVALUATION: "the evaluation of step {}",
    CHECKPOINT: "the checkpoint of step {}",
    COPY: "the copy of the state of step {}",
    JOIN: "the meeting of the workers at step {}",
    REGROUP: "the end of a generation at step {}",
    WAITING: "the beginning of a generation at step {}",
}


@dataclass(frozen=True)
class Stall:
    """Nobody has come any further `since` then, for `seconds`, where `limit` seconds are too many.

    The culprit holds the others up; unless it `waits_too`, and all wait for each other.
    """

    step: int
    since: float
    seconds: float
    limit: float
    culprit: Enrolled
    waits_too: bool
    message: str

    @property
    def is_over(self) -> bool:
        """Whether nobody waits any longer."""
        return self.seconds >= self.limit

    def failure(self, step_timeout: float | None) -> Failure:
        """Why the culprit counts as lost."""
        message = f"{self.message} That is longer than step_timeout ({limit_words(step_timeout, self.limit)})."
        place = self.culprit.place
        return Failure(WORKER_LOST, message, worker=self.culprit.worker, step=place.step, phase=place.phase)

    def warning(self, step_timeout: float | None) -> str:
        """What to tell the user while it is waited for."""
        return f"{self.message} It is waited for until step_timeout ({limit_words(step_timeout, self.limit)})."


def at_place(crew: Crew, known: Enrolled, place: Place, now: float, *, is_over: bool = False) -> Crew:
    """A worker tells where it is: if that is any further, it moves now, and what it was in took it until now.

    Not where its generation is over: what it was in was broken off, perhaps after a wait for one that hung. To count
    that would raise the limit a hundredfold, and the next hang would never be noticed.
    """
    before = known.place
    if place == before:
        return crew.having(known)
    moved = crew.having(replace(known, place=place, moved=now))
    is_broken_off = is_over or place.phase == REGROUP
    if known.is_ready or not before.phase or is_broken_off or before.waits_for == OTHERS:
        return moved
    if now - crew.ticked > crew.terms.timing.failure_timeout / 2:
        return moved  # the coordinator itself was held up, and a machine that slept says nothing of the phase
    took = now - max(known.moved, crew.formed)
    return replace(moved, took={**crew.took, before.phase: max(took, crew.took.get(before.phase, 0.0))})


def find_stall(state: Active, now: float) -> Stall | None:
    """What has stood still for so long that somebody should know, if anything has.

    A generation that is over waits for those who have not left it; they have one `failure_timeout` to do so.
    """
    crew = state.crew
    members = [known for known in crew.enrolled if not known.is_ready]
    if not members or (isinstance(state, Forming) and now - state.since < crew.terms.timing.failure_timeout):
        return None
    since = max(crew.formed, *(known.moved for known in members))
    limit = stall_limit(crew)
    seconds = now - since
    if seconds < min(limit, patience(crew.took, members)):
        return None
    done = {completed.worker for completed in state.completed} if isinstance(state, Training) else set()
    holding_up = [known for known in members if known.worker not in done and not _waits_for_others(known.place)]
    # Where all wait for each other, any of them may be the trouble: going on without one makes new links.
    culprit = min(holding_up, key=lambda known: known.moved) if holding_up else members[-1]
    step = culprit.place.step or 0
    return Stall(step, since, seconds, limit, culprit, not holding_up, _sentence(culprit, seconds, members, holding_up))


def stall_limit(crew: Crew) -> float:
    """Seconds without progress that are too many. What a phase of waiting has taken says nothing of anybody's work."""
    if crew.terms.step_timeout is not None:
        return crew.terms.step_timeout
    longest = max((took for phase, took in crew.took.items() if phase not in _MEETINGS), default=0.0)
    return max(LONGEST_STALL, TIMES_LONGEST * longest)


def limit_words(step_timeout: float | None, limit: float) -> str:
    """The value of `step_timeout` as a sentence names it."""
    return str(step_timeout) if step_timeout is not None else f"not set, so {limit:.0f} s without any progress"


def patience(took: Mapping[str, float], members: Sequence[Enrolled]) -> float:
    """Seconds without progress before it is told, by what the phases that these are in have taken so far."""
    return max(PATIENCE, TIMES_USUAL * max(took.get(known.place.phase, 0.0) for known in members))


def count_hang(crew: Crew, stall: Stall) -> Crew:
    """Remember who hangs where, as long as it is in the same phase of the same step. Links that are stuck are no such
    place: another generation has others. Those who hang in one generation count as one: what they share is stuck."""
    before, generation = crew.hangs, crew.generations
    if stall.waits_too or (before is not None and before.generation == generation):
        return crew
    step, phase = stall.step, stall.culprit.place.phase
    alike = before.times if before is not None and (before.step, before.phase) == (step, phase) else 0
    return replace(crew, hangs=Hangs(step, phase, alike + 1, generation))


def autopsy_of_hangs(crew: Crew, failure: Failure) -> Failure | None:
    """Why to give up: so many have hung in the same place that the next will as well."""
    if crew.hangs is None or crew.hangs.times < MOST_HANGS:
        return None
    message = (
        f"{failure.message} Workers have now hung there {crew.hangs.times} times in a row, so the job is given up; "
        "`quorate resume` goes on from the newest checkpoint once the cause is mended."
    )
    return failure.at(message=message)


def _waits_for_others(place: Place) -> bool:
    return place.phase in _MEETINGS or place.waits_for == OTHERS


def _sentence(culprit: Enrolled, seconds: float, members: Sequence[Enrolled], holding_up: Sequence[Enrolled]) -> str:
    what = _WHAT.get(culprit.place.phase, "step {}").format(culprit.place.step or 0)
    doing = ", ".join(f"{name_enrolled(known)} is in {_phase(known.place)}" for known in members)
    return f"{what} has not come any further for {seconds:.1f} s: {doing}; {_why(holding_up)}."


def _phase(place: Place) -> str:
    return f"{place.phase} and waits for {place.waits_for}" if place.waits_for else place.phase


def _why(holding_up: Sequence[Enrolled]) -> str:
    if not holding_up:
        return "all wait for each other, so the links between them are stuck"
    *others, last = sorted(known.worker for known in holding_up)
    who = f"workers {', '.join(map(str, others))} and {last}" if others else f"worker {last}"
    if waited := sorted({known.place.waits_for for known in holding_up} - {""}):
        hint = ", which does not answer" if waited == [DISK] else ""
        return f"{who} {'wait' if others else 'waits'} for {' and '.join(waited)}{hint}"
    phases = {known.place.phase for known in holding_up}
    doing = sorted(_USER_CODE.get(phase) or _DOING.get(phase, phase) for phase in phases)
    own = "their code" if others else "its code"
    code = "the task's own code" if phases <= _USER_CODE.keys() else own
    return f"{who} {'are' if others else 'is'} held up in {code} ({' and '.join(doing)})"
