"""Work that stands still: who holds it up, what everybody is doing, and when that is too long.

A worker that hangs still sends its heartbeats. They carry its phase, what it waits for, and a number that changes
whenever it makes progress: a lane, an evaluation batch, a piece of a copy or of a save. If nobody in a generation makes
progress, that is reported; if it lasts, the worker that holds up the others counts as lost. Every phase is watched.
Before a worker registers it is in no generation: its setup is watched by the supervisor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from quorate.coordinator.autopsy import name_enrolled, what_happened
from quorate.coordinator.events import ExitReported, Reading
from quorate.coordinator.states import Active, Enrolled, Forming, Hangs, Members, Training, Victim
from quorate.core.failure import POISON_BATCH, Failure, name_samples
from quorate.core.generation import (
    APPLY,
    CHECKPOINT,
    COMPUTE,
    COPY,
    DATA,
    DISK,
    EVALUATION,
    EXCHANGE,
    GAVE_UP,
    JOIN,
    OTHERS,
    REGROUP,
    WAITING,
    WorkerStatus,
    names_of,
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
    EXCHANGE: "summing its gradients",
    JOIN: "preparing its sums",
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
FATAL = 3
"""So many workers may die in the same lane of the same step."""
_WHEN = {DATA: "while its samples were read", COMPUTE: "while its loss was computed"}


@dataclass(frozen=True)
class Stall:
    """Nobody has made progress `since` then, for `seconds`, where `limit` seconds are too many.

    The culprit holds the others up; unless it `waits_too`, and all wait for each other.
    """

    step: int
    since: float
    seconds: float
    limit: float
    culprit: Enrolled
    waits_too: bool
    message: str


def with_status(
    members: Members, known: Enrolled, status: WorkerStatus, now: float, *, is_over: bool = False
) -> Members:
    """A worker tells where it is: if that is any further, it moves now, and what it was in took it until now.

    Not where its generation is over: what it was in was broken off, perhaps after a wait for one that hung. To count
    that would raise the limit a hundredfold, and the next hang would never be noticed.
    """
    before = known.status
    if status == before:
        return members.having(known)
    moved = members.having(replace(known, status=status, moved=now))
    is_broken_off = is_over or status.phase == REGROUP
    if known.is_ready or not before.phase or is_broken_off or before.waits_for == OTHERS:
        return moved
    if now - members.ticked > members.settings.timing.failure_timeout / 2:
        return moved  # the coordinator itself was held up, and a machine that slept says nothing of the phase
    took = now - max(known.moved, members.formed)
    return replace(moved, took={**members.took, before.phase: max(took, members.took.get(before.phase, 0.0))})


def find_stall(state: Active, now: float) -> Stall | None:
    """What has stood still for so long that somebody should know, if anything has.

    A generation that is over waits for those who have not left it; they have one `failure_timeout` to do so.
    """
    members = state.members
    at_work = [known for known in members.enrolled if not known.is_ready]
    if not at_work or (isinstance(state, Forming) and now - state.since < members.settings.timing.failure_timeout):
        return None
    since = max(members.formed, *(known.moved for known in at_work))
    limit = stall_limit(members)
    seconds = now - since
    if seconds < min(limit, patience(members.took, at_work)):
        return None
    done = {completed.worker for completed in state.completed} if isinstance(state, Training) else set()
    holding_up = [
        known
        for known in at_work
        if known.worker not in done and known.status.phase not in _MEETINGS and known.status.waits_for != OTHERS
    ]
    # Where all wait for each other, any of them may be the trouble: going on without one makes new links.
    # Not a server if need be: what it holds may be with nobody else.
    last = [known for known in at_work if not known.is_server] or at_work
    culprit = min(holding_up, key=lambda known: known.moved) if holding_up else last[-1]
    step = culprit.status.step or 0
    return Stall(step, since, seconds, limit, culprit, not holding_up, _sentence(culprit, seconds, at_work, holding_up))


def stall_limit(members: Members) -> float:
    """Seconds without progress that are too many. What a phase of waiting has taken says nothing of anybody's work."""
    if members.settings.step_timeout is not None:
        return members.settings.step_timeout
    longest = max((took for phase, took in members.took.items() if phase not in _MEETINGS), default=0.0)
    return max(LONGEST_STALL, TIMES_LONGEST * longest)


def limit_words(step_timeout: float | None, limit: float) -> str:
    """The value of `step_timeout` as a sentence names it."""
    return str(step_timeout) if step_timeout is not None else f"not set, so {limit:.0f} s without any progress"


def patience(took: Mapping[str, float], at_work: Sequence[Enrolled]) -> float:
    """Seconds without progress before it is told, by what the phases that these are in have taken so far."""
    return max(PATIENCE, TIMES_USUAL * max(took.get(known.status.phase, 0.0) for known in at_work))


def count_hang(members: Members, stall: Stall) -> Members:
    """Remember who hangs where, as long as it is in the same phase of the same step. Links that are stuck are no such
    place: another generation has others. Those who hang in one generation count as one: what they share is stuck."""
    before, generation = members.hangs, members.generations
    if stall.waits_too or (before is not None and before.generation == generation):
        return members
    step, phase = stall.step, stall.culprit.status.phase
    alike = before.times if before is not None and (before.step, before.phase) == (step, phase) else 0
    return replace(members, hangs=Hangs(step, phase, alike + 1, generation))


def autopsy_of_hangs(members: Members, failure: Failure) -> Failure | None:
    """Why to give up: so many have hung in the same place that the next will as well."""
    if members.hangs is None or members.hangs.times < MOST_HANGS:
        return None
    message = (
        f"{failure.message} Workers have now hung there {members.hangs.times} times in a row, so the job is stopped. "
        "If it may take so long, raise or remove step_timeout."
    )
    return failure.at(message=message)


def _sentence(culprit: Enrolled, seconds: float, at_work: Sequence[Enrolled], holding_up: Sequence[Enrolled]) -> str:
    what = _WHAT.get(culprit.status.phase, "step {}").format(culprit.status.step or 0)
    doing = ", ".join(f"{name_enrolled(known)} is in {_phase(known.status)}" for known in at_work)
    return f"{what} has made no progress for {seconds:.1f} s: {doing}; {_why(holding_up, at_work)}."


def _phase(status: WorkerStatus) -> str:
    return f"{status.phase} and waits for {status.waits_for}" if status.waits_for else status.phase


def _why(holding_up: Sequence[Enrolled], at_work: Sequence[Enrolled]) -> str:
    holding_up = holding_up or (at_work if len(at_work) == 1 else ())  # who is alone has nobody to wait for
    if not holding_up:
        return "all wait for each other, so the links between them are stuck"
    others = holding_up[1:]
    who = names_of((known.worker for known in holding_up), " and ")
    if waited := sorted({known.status.waits_for for known in holding_up} - {""}):
        hint = ", which does not answer" if waited == [DISK] else ""
        return f"{who} {'wait' if others else 'waits'} for {' and '.join(waited)}{hint}"
    phases = {known.status.phase for known in holding_up}
    doing = sorted(_USER_CODE.get(phase) or _DOING.get(phase, phase) for phase in phases)
    own = "their code" if others else "its code"
    code = "the task's own code" if phases <= _USER_CODE.keys() else own
    return f"{who} {'are' if others else 'is'} held up in {code} ({' and '.join(doing)})"


# --- a step that kills every worker that takes it: whoever is next would die of it as well


def with_victim(
    victims: tuple[Victim, ...], event: ExitReported, known: Enrolled, last_words: str = ""
) -> tuple[Victim, ...]:
    """Those who died in a row in the task's own code at one step, after another death.

    Lanes are told apart later: at a step that kills in every lane, workers die in several of them by turns.
    """
    step, phase, reading = event.status.step, event.status.phase, event.reading
    # Who stops for a symptom has not died of what it read; whose loader has died, has.
    is_symptom = bool(last_words) and event.exit_code != GAVE_UP
    if step is None or reading is None or phase not in _WHEN or is_symptom:
        return ()
    why = f" ({last_words.partition('. ')[0].rstrip('.')})" if last_words else ""
    how = f"{name_enrolled(known)} {what_happened(event)[0]}{why}"
    victim = Victim(event.worker, step, phase, reading, how)
    return (*(before for before in victims if before.step == step), victim)


def find_poison(victims: Sequence[Victim]) -> Failure | None:
    """Why to give up: enough have died in the lane that the last one died in."""
    if not victims:
        return None
    last = victims[-1]
    alike = [victim for victim in victims if victim.reading.lane == last.reading.lane]
    return _failure(alike) if len(alike) >= FATAL else None


def _failure(alike: Sequence[Victim]) -> Failure:
    last = alike[-1]
    reading = last.reading
    deaths = "; ".join(f"{victim.how} {_WHEN[victim.phase]}" for victim in alike)
    message = (
        f"step {last.step} (epoch {reading.epoch}) kills every worker that takes its lane {reading.lane}: {deaths}. "
        f"The lane has {_samples(reading)}. Look at these samples and at what the task does with them; fix it or "
        "leave them out. `on_nonfinite_loss: skip` is no remedy: it is for a loss that is not finite."
    )
    return Failure(
        POISON_BATCH,
        message,
        worker=last.worker,
        lane=reading.lane,
        step=last.step,
        phase=last.phase,
        samples=reading.samples,
    )


def _samples(reading: Reading) -> str:
    if not reading.count:
        return "samples that were not reported"
    listed = ", of which failure.samples in result.json lists the first" if reading.count > len(reading.samples) else ""
    return f"{name_samples(reading.samples, reading.count)}{listed}"
