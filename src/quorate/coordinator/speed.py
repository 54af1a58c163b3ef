"""How fast workers are: who is slower than the others, and how lanes are shared because of it.

What a worker waits for in an exchange is not its own slowness, so it does not count. A worker that is short of nothing
but luck is slow for some steps; a straggler stays far behind. It is named, not killed.

Which worker computes a lane changes no bit, so by `balance: speed` lanes are given to whoever is fast. Sharing them
anew costs a new generation, and is worth it only where a step gets a good deal shorter.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from quorate.coordinator.autopsy import name_enrolled
from quorate.coordinator.states import Enrolled, JobSettings, Measured, Members, Training
from quorate.core.generation import COMPUTE, DATA, Pace, name_of
from quorate.lanes.chunks import host_lanes, host_lanes_by_speed, slowest_seconds

FAR_BEHIND = 2.0
"""So many times the others' median makes a straggler,"""
LEAST_EXCESS = 0.005
"""if it is also so many seconds a step."""
CAUGHT_UP = 1.5
"""Below so many times, it has recovered."""
LEAST_STEPS, LEAST_WORK = 20, 2.0
"""So many steps, and seconds of its own work, does it have to be behind."""
_KEPT = 0.9
SPEED = "speed"
WORTHWHILE = 0.8
"""To so much of what it takes now must a step be shortened."""
MEASURED_STEPS = 20
"""So many steps lie between two generations that share anew, and so many of a worker tell its speed."""
HEARTBEATS_BETWEEN = 10
_SHORTEST = 1e-9


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


def judge(members: Members, known: Enrolled, hosted: range, pace: Pace) -> tuple[Enrolled, str]:
    """A worker that tells its pace, measured; and what to tell the user, if it is a straggler and that is news."""
    measured = measure(known.measured, pace)
    others = [
        other.measured.pace
        for other in members.enrolled
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
        is_reported = measured.is_reported and own >= CAUGHT_UP * usual
        measured = replace(measured, slow_steps=0, slow_s=0.0, is_reported=is_reported)
    if measured.is_reported or measured.slow_steps < LEAST_STEPS or measured.slow_s < LEAST_WORK:
        return replace(known, measured=measured), ""
    told = replace(known, measured=replace(measured, is_reported=True))
    return told, _sentence(told, hosted, measured.pace, others, members.settings)


def _sentence(known: Enrolled, hosted: range, own: Pace, others: Sequence[Pace], settings: JobSettings) -> str:
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
    remedy = "Look at that host"
    if settings.balance == SPEED:
        remedy = "By `balance: speed` it hosts fewer lanes where that shortens the step"
    elif settings.mesh is None:
        remedy += ", or set `balance: speed`, which gives it fewer lanes and changes no bit of the result"
    return (
        f"{name_enrolled(known)} is slow in {phase}: {lanes} {_ms(own.lane_s)}, {times} those of the others "
        f"({_ms(usual)}){waiting}. {remedy}."
    )


def share_lanes(members: Members, taking_part: Sequence[Enrolled]) -> tuple[range, ...]:
    """The lanes of each, in their order. Whose speed is not known yet counts as neither fast nor slow."""
    lanes, mesh = members.settings.lanes, members.settings.mesh
    if mesh is not None:
        return tuple(mesh.told_by(one.worker, lanes) for one in taking_part)
    is_balanced = members.settings.balance == SPEED
    known = {one.worker: _lane_seconds(one) for one in taking_part if is_balanced and _is_measured(one)}
    if not known:
        return host_lanes(lanes, len(taking_part))
    usual = median(known.values())
    return host_lanes_by_speed(lanes, [known.get(one.worker, usual) for one in taking_part])


def find_better_sharing(state: Training, step: int, now: float) -> str:
    """Why to share the lanes anew at the next step boundary; empty when there is no reason, or it is too early."""
    members = state.members
    if members.settings.balance != SPEED or members.stop is not None or state.is_called or state.completed:
        return ""
    is_too_early = (
        step - state.generation.cursor.step < MEASURED_STEPS
        or now - members.formed < HEARTBEATS_BETWEEN * members.settings.timing.heartbeat_every
    )
    at_work = [members.find(member.worker) for member in state.generation.workers]
    measured = [known for known in at_work if known is not None and _is_measured(known)]
    if is_too_early or len(measured) < len(at_work):
        return ""
    seconds = [_lane_seconds(known) for known in measured]
    present = tuple(member.lanes for member in state.generation.workers)
    best = host_lanes_by_speed(members.settings.lanes, seconds)
    # Everybody applies the update after the exchange, however lanes are shared.
    apply_s = max(known.measured.pace.apply_s for known in measured if known.measured is not None)
    takes, would_take = (slowest_seconds(sharing, seconds) + apply_s for sharing in (present, best))
    if would_take > WORTHWHILE * takes:
        return ""
    speeds = ", ".join(
        f"{name_of(known.worker)} ({lane_s * 1000:.3g} ms a lane) hosts {len(after)} instead of {len(before)}"
        for known, lane_s, before, after in zip(measured, seconds, present, best, strict=True)
    )
    return (
        f"the lanes are redistributed by speed at the next step boundary: {speeds}. The work of a step is expected to "
        f"take {would_take * 1000:.3g} ms instead of {takes * 1000:.3g} ms."
    )


def _is_measured(known: Enrolled) -> bool:
    return known.measured is not None and known.measured.pace.steps >= MEASURED_STEPS


def _lane_seconds(known: Enrolled) -> float:
    return _SHORTEST if known.measured is None else max(known.measured.pace.lane_s, _SHORTEST)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"
