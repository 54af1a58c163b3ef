"""How a flat tensor is cut into chunks, the order in which lanes are added to each, and who adds, sends, receives what.

All of it is a pure function of the hosting. A chunk walks the ring of workers one position a round. At each visit the
worker adds the lanes it hosts whose turn it is; the visit that adds the last lane finishes the sum, and the finished
chunk walks on until every worker has it. A chunk that began at position s is at position s + r in round r, so what one
worker sends in a round is, in the same order, what the next one receives in the round after: a link carries frames in
exactly one order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby, pairwise


@lru_cache(maxsize=1024)  # the same few cuts, several times a step
def cut(length: int, parts: int) -> tuple[slice, ...]:
    """Contiguous slices, as even as possible, the larger ones first; where there is too little, the last are empty."""
    if length < 0 or parts < 1:
        raise ValueError(f"a length of {length} cannot be cut into {parts} parts: length >= 0 and parts >= 1 must hold")
    size, larger = divmod(length, parts)
    starts = [part * size + min(part, larger) for part in range(parts + 1)]
    return tuple(slice(start, stop) for start, stop in pairwise(starts))


def summation_order(chunk: int, lanes: int) -> tuple[int, ...]:
    """The order in which lanes are added: `chunk` + 1, then the next, round to `chunk` itself, whoever hosts them."""
    return tuple((chunk + 1 + distance) % lanes for distance in range(lanes))


@dataclass(frozen=True)
class Visit:
    """One chunk at one worker: receive it, add lanes in this order, send it on."""

    round: int
    chunk: int
    adds: tuple[int, ...]
    receives: bool
    finished: bool
    sends: bool


def plan_exchange(hosting: Sequence[range]) -> tuple[tuple[Visit, ...], ...]:
    """For each ring position its visits, in the order in which the worker there carries them out."""
    lanes = sum(len(hosted) for hosted in hosting)
    visits: list[list[Visit]] = [[] for _ in hosting]
    for chunk in range(lanes):
        for position, visit in _walk(chunk, lanes, hosting):
            visits[position].append(visit)
    return tuple(tuple(sorted(at, key=lambda visit: (visit.round, visit.chunk))) for at in visits)


def _walk(chunk: int, lanes: int, hosting: Sequence[range]) -> list[tuple[int, Visit]]:
    """A chunk's visits, each with its ring position."""
    stops = _stops(chunk, lanes, hosting)
    summing = len(stops)
    stops += [((stops[-1][0] + distance) % len(hosting), ()) for distance in range(1, len(hosting))]
    return [
        (
            position,
            Visit(
                round=round_,
                chunk=chunk,
                adds=adds,
                receives=round_ > 0,
                finished=round_ >= summing - 1,
                sends=round_ < len(stops) - 1,
            ),
        )
        for round_, (position, adds) in enumerate(stops)
    ]


def _stops(chunk: int, lanes: int, hosting: Sequence[range]) -> list[tuple[int, tuple[int, ...]]]:
    """The positions at which a chunk is summed, one after the other on the ring, and the lanes added at each."""
    host = {lane: position for position, hosted in enumerate(hosting) for lane in hosted}
    stops: list[tuple[int, tuple[int, ...]]] = []
    for position, adds in groupby(summation_order(chunk, lanes), key=host.__getitem__):
        # Links lead to the next worker only: another order of lanes costs detours, but never skips a link.
        while stops and (stops[-1][0] + 1) % len(hosting) != position:
            stops.append(((stops[-1][0] + 1) % len(hosting), ()))
        stops.append((position, tuple(adds)))
    return stops


# --- which worker hosts which lanes


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
