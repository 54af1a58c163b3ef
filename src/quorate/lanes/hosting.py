"""Which worker hosts which lanes."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from quorate.lanes.chunks import cut


def host_lanes(lanes: int, workers: int) -> tuple[range, ...]:
    """Contiguous lanes for each worker, as even as possible; earlier workers get the larger shares."""
    _check(lanes, workers)
    return tuple(range(share.start, share.stop) for share in cut(lanes, workers))


def host_lanes_by_speed(lanes: int, lane_seconds: Sequence[float]) -> tuple[range, ...]:
    """Contiguous lanes for each worker such that the slowest is done as soon as can be.

    `lane_seconds` is how long a lane takes each worker. Each hosts a lane at least. Equal workers share evenly.
    """
    _check(lanes, len(lane_seconds))
    if any(not seconds > 0 for seconds in lane_seconds):
        raise ValueError(f"a lane takes a time above 0, not {min(lane_seconds)} s")
    counts = [1] * len(lane_seconds)
    for _ in range(lanes - len(counts)):
        # Each goes to whoever has it done first: no other choice ends sooner, whatever comes after.
        soonest = min(range(len(counts)), key=lambda worker: ((counts[worker] + 1) * lane_seconds[worker], worker))
        counts[soonest] += 1
    return tuple(range(start, stop) for start, stop in pairwise(accumulate(counts, initial=0)))


def slowest_seconds(hosting: Sequence[range], lane_seconds: Sequence[float]) -> float:
    """How long the last worker takes for its lanes."""
    return max(len(hosted) * seconds for hosted, seconds in zip(hosting, lane_seconds, strict=True))


def _check(lanes: int, workers: int) -> None:
    if not 1 <= workers <= lanes:
        raise ValueError(f"{workers} workers cannot host {lanes} lanes: 1 <= workers <= lanes must hold")
