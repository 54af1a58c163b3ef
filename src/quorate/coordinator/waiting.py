"""What time brings: silence, stalls and trials."""

from dataclasses import replace

from quorate.coordinator.actions import Expel, RecordLoss, Regroup, Warn
from quorate.coordinator.autopsy import WORKER_LOST, autopsy_of_no_return, autopsy_of_silence
from quorate.coordinator.decision import Decision
from quorate.coordinator.forming import end, fill_place, lose
from quorate.coordinator.stall import Stall, autopsy_of_hangs, count_hang, find_stall, limit_words, stall_limit
from quorate.coordinator.states import Active, Forming, Recalling, Training, Unended
from quorate.coordinator.succession import without_missing
from quorate.coordinator.weak_links import who_may_return
from quorate.core.failure import Failure

_SELDOM = 3600.0
"""Seconds at most between two tellings of the same."""


def tick(state: Active, now: float) -> Decision:
    """Time has passed."""
    crew = state.crew
    timeout = crew.terms.timing.failure_timeout
    if now - crew.ticked > timeout / 2:
        return _forgive_silence(state, now)
    unended = {process: crew.unended.get(process, Unended(now, now + timeout)) for process in sorted(crew.expelled)}
    state = replace(state, crew=replace(crew, ticked=now, unended=unended))
    quietest = min(crew.enrolled, key=lambda known: known.heard, default=None)
    if quietest and now - quietest.heard >= timeout:
        failure = autopsy_of_silence(quietest, now, crew.terms)
        return lose(state, quietest, failure, now - quietest.heard, now, expel=True)
    if isinstance(state, Recalling):
        return _give_up_missing(state, now)
    return _find_unended(state, now) or _watch_work(state, now)


def _watch_work(state: Forming | Training, now: float) -> Decision:
    if stall := find_stall(state, now):
        return _act_on_stall(state, stall, now)
    if isinstance(state, Training):
        return _let_in_again(state, now)
    # Whoever is on the way to its place takes what time it needs: its supervisor tells when it is gone.
    return Decision(state, (), "nothing is overdue")


def _forgive_silence(state: Active, now: float) -> Decision:
    """Nobody is lost by a pause of the coordinator itself (a suspended machine, a stopped process group)."""
    crew = state.crew
    heard = tuple(replace(known, heard=now, moved=now) for known in crew.enrolled)
    suspicion = crew.suspicion and replace(crew.suspicion, since=now)
    reason = f"the coordinator was held up for {now - crew.ticked:.1f} s; silence counts from now"
    forgiven: Active = replace(state, crew=replace(crew, ticked=now, enrolled=heard, suspicion=suspicion, unended={}))
    if not isinstance(forgiven, Training):
        forgiven = replace(forgiven, since=forgiven.since + now - crew.ticked)
    return Decision(forgiven, (), reason)


def _find_unended(state: Forming | Training, now: float) -> Decision | None:
    """A process was killed and does not end: it is told, and where a generation waits for long the job is given up.

    The kernel ends nobody who waits for a disk that does not answer, and until then its place cannot be filled.
    """
    crew, terms = state.crew, state.crew.terms
    limit = max(stall_limit(crew), 2 * terms.timing.failure_timeout)
    for (worker, pid), killed in crew.unended.items():
        seconds = now - killed.since
        message = (
            f"worker {worker} (pid {pid}) was killed {seconds:.0f} s ago and does not end, so nobody can take its"
            " place. Probably it waits in the kernel, for a disk or a network file system that does not answer."
        )
        if isinstance(state, Forming) and now - max(killed.since, state.since) >= limit:
            why = (
                f"{message} The next generation has waited for longer than step_timeout"
                f" ({limit_words(terms.step_timeout, limit)}), so the job is given up; `quorate resume` goes on from"
                " the newest checkpoint once the cause is mended."
            )
            return end(Failure(WORKER_LOST, why, worker=worker))
        if now >= killed.tell_at:
            later = replace(killed, tell_at=now + min(2 * seconds, _SELDOM))
            told = replace(state, crew=replace(crew, unended={**crew.unended, (worker, pid): later}))
            return Decision(told, (Warn(message, crew.cursor.step),), message)
    return None


def _act_on_stall(state: Active, stall: Stall, now: float) -> Decision:
    crew = state.crew
    step_timeout = crew.terms.step_timeout
    if stall.is_over:
        failure = stall.failure(step_timeout)
        crew = count_hang(crew, stall)
        if hopeless := autopsy_of_hangs(crew, failure):
            return end(hopeless, RecordLoss(failure, stall.seconds))
        return lose(replace(state, crew=crew), stall.culprit, failure, stall.seconds, now, expel=True)
    if crew.told_stall == stall.since:
        return Decision(state, (), f"step {stall.step} still takes its time")
    message = stall.warning(step_timeout)
    told = replace(state, crew=replace(crew, told_stall=stall.since))
    return Decision(told, (Warn(message, stall.step),), message)


def _give_up_missing(state: Recalling, now: float) -> Decision:
    """Those who have not come back are lost, one after the other; until then nobody is who was not reaped."""
    if not state.missing or now - state.since < state.crew.terms.timing.failure_timeout:
        return Decision(state, (), "nothing is overdue")
    worker, pid = process = min(state.missing)
    failure = autopsy_of_no_return(worker, pid, state.crew.terms)
    gone = without_missing(state, process)
    left = replace(gone, crew=replace(gone.crew, expelled=gone.crew.expelled | {process}))
    actions = (RecordLoss(failure, now - state.since), Expel(worker, pid))
    return fill_place(left, worker, failure, actions, now, is_vacant=False)


def _let_in_again(state: Training, now: float) -> Decision:
    """Who was left out for a bad link is let in again at a step boundary: to train with it is to try it."""
    crew = state.crew
    back = who_may_return(crew, now) if crew.stop is None and not state.is_called else {}
    if not back:
        return Decision(state, (), "nothing is overdue")
    told = ", ".join(
        f"worker {worker} (its link between workers {link.pair[0]} and {link.pair[1]} has rested"
        f" {now - link.failed:.1f} s)"
        for worker, link in back.items()
    )
    action = Regroup(state.generation.id, at_boundary=True)
    return Decision(replace(state, is_called=True), (action,), f"let in again at the next step boundary: {told}")
