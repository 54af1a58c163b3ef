"""Workers that are slower than the others, by what their own work takes them. They are named, not killed.

What a worker waits for in an exchange is not its own slowness, so it does not count. A worker that is short of nothing
but luck is slow for some steps; a straggler stays far behind.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from quorate.coordinator.autopsy import name_enrolled
from quorate.coordinator.states import Crew, Enrolled, Measured
from quorate.core.worker_status import COMPUTE, DATA, Pace

FAR_BEHIND = 2.0
"""So many times the others' median makes a straggler,"""
LEAST_EXCESS = 0.005
"""if it is also so many seconds a step."""
CAUGHT_UP = 1.5
"""Below so many times, it has recovered."""
LEAST_STEPS, LEAST_WORK = 20, 2.0
"""So many steps, and seconds of its own work, does it have to be behind."""

_KEPT = 0.9


def measure(before: Measured | None, pace: Pace) -> Measured:
    """With the pace of some more steps; what is older counts for less with every step."""
    if before is None:
        return Measured(pace)
    kept = _KEPT**pace.steps
    old = before.pace
    smoothed = Pace(
        old.steps + pace.steps,
        pace.lanes,
        kept * old.data_s + (1 - kept) * pace.data_s,
        kept * old.compute_s + (1 - kept) * pace.compute_s,
        kept * old.apply_s + (1 - kept) * pace.apply_s,
    )
    return replace(before, pace=smoothed)


def judge(crew: Crew, known: Enrolled, hosted: range, pace: Pace) -> tuple[Enrolled, str]:
    """A worker that tells its pace, measured; and what to tell the user, if it is a straggler and that is news."""
    measured = measure(known.measured, pace)
    others = [
        other.measured.pace
        for other in crew.enrolled
        if other.worker != known.worker and other.within == known.within and other.measured is not None
    ]
    if not others:
        return replace(known, measured=measured), ""
    usual = median(other.lane_s for other in others)
    own = measured.pace.lane_s
    if own >= FAR_BEHIND * usual and (own - usual) * pace.lanes >= LEAST_EXCESS:
        slow_steps, slow_s = measured.slow_steps + pace.steps, measured.slow_s + pace.steps * pace.work_s
        measured = replace(measured, slow_steps=slow_steps, slow_s=slow_s)
    else:
        is_told = measured.is_told and own >= CAUGHT_UP * usual
        measured = replace(measured, slow_steps=0, slow_s=0.0, is_told=is_told)
    if measured.is_told or measured.slow_steps < LEAST_STEPS or measured.slow_s < LEAST_WORK:
        return replace(known, measured=measured), ""
    told = replace(known, measured=replace(measured, is_told=True))
    return told, _sentence(told, hosted, measured.pace, others, crew.terms.balance)


def _sentence(known: Enrolled, hosted: range, own: Pace, others: Sequence[Pace], balance: str) -> str:
    usual = median(other.lane_s for other in others)
    excess = {
        DATA: own.data_s - median(other.data_s for other in others),
        COMPUTE: own.compute_s - median(other.compute_s for other in others),
    }
    phase = max(excess, key=lambda name: excess[name])
    times = f"{own.lane_s / usual:.1f} times as long as" if usual > 0 else "longer than"
    lanes = (
        f"its lane {hosted[0]} takes" if len(hosted) == 1 else f"each of its lanes {hosted[0]} to {hosted[-1]} takes"
    )
    # With fewer lanes it may be done with the others.
    is_last = own.work_s > max(other.work_s for other in others)
    waiting = ", who wait for it at every step" if is_last else ""
    remedy = (
        "By `balance: speed` it hosts fewer lanes where that shortens the step"
        if balance == "speed"
        else "Look at that host, or set `balance: speed`, which gives it fewer lanes and changes no bit of the result"
    )
    return (
        f"{name_enrolled(known)} is slow in {phase}: {lanes} {_ms(own.lane_s)}, {times} those of the others "
        f"({_ms(usual)}){waiting}. {remedy}."
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"
