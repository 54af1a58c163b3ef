"""How lanes are shared among workers: evenly or, by `balance: speed`, such that the slowest is done soonest.

Which worker computes a lane changes no bit, so lanes can be given to whoever is fast. Sharing them anew costs a new
generation, and is worth it only where a step gets a good deal shorter.
"""

from collections.abc import Sequence
from statistics import median

from quorate.coordinator.states import Crew, Enrolled, Training
from quorate.lanes.hosting import host_lanes, host_lanes_by_speed, slowest_seconds

SPEED = "speed"
WORTHWHILE = 0.8
"""To so much of what it takes now must a step be shortened."""
MEASURED_STEPS = 20
"""So many steps lie between two generations that share anew, and so many of a worker tell its speed."""
HEARTBEATS_BETWEEN = 10

_SHORTEST = 1e-9


def share_lanes(crew: Crew, taking_part: Sequence[Enrolled]) -> tuple[range, ...]:
    """The lanes of each, in their order. Whose speed is not known yet counts as neither fast nor slow."""
    lanes = crew.terms.lanes
    known = {one.worker: _lane_seconds(one) for one in taking_part if _is_measured(one)}
    if crew.terms.balance != SPEED or not known:
        return host_lanes(lanes, len(taking_part))
    usual = median(known.values())
    return host_lanes_by_speed(lanes, [known.get(one.worker, usual) for one in taking_part])


def find_better_sharing(state: Training, step: int, now: float) -> str:
    """Why to share the lanes anew at the next step boundary; empty when there is no reason, or it is too early."""
    crew = state.crew
    if crew.terms.balance != SPEED or crew.stop is not None or state.is_called or state.completed:
        return ""
    is_too_early = (
        step - state.generation.cursor.step < MEASURED_STEPS
        or now - crew.formed < HEARTBEATS_BETWEEN * crew.terms.timing.heartbeat_every
    )
    members = [crew.find(member.worker) for member in state.generation.members]
    measured = [known for known in members if known is not None and _is_measured(known)]
    if is_too_early or len(measured) < len(members):
        return ""
    seconds = [_lane_seconds(known) for known in measured]
    present = tuple(member.lanes for member in state.generation.members)
    best = host_lanes_by_speed(crew.terms.lanes, seconds)
    # Everybody applies the update after the exchange, however lanes are shared.
    apply_s = max(known.measured.pace.apply_s for known in measured if known.measured is not None)
    takes, would_take = (slowest_seconds(sharing, seconds) + apply_s for sharing in (present, best))
    if would_take > WORTHWHILE * takes:
        return ""
    speeds = ", ".join(
        f"worker {known.worker} ({lane_s * 1000:.3g} ms a lane) hosts {len(after)} instead of {len(before)}"
        for known, lane_s, before, after in zip(measured, seconds, present, best, strict=True)
    )
    return (
        f"the lanes are shared anew by speed at the next step boundary: {speeds}. The work of a step is expected to "
        f"take {would_take * 1000:.3g} ms instead of {takes * 1000:.3g} ms."
    )


def _is_measured(known: Enrolled) -> bool:
    return known.measured is not None and known.measured.pace.steps >= MEASURED_STEPS


def _lane_seconds(known: Enrolled) -> float:
    return _SHORTEST if known.measured is None else max(known.measured.pace.lane_s, _SHORTEST)
