"""Links that fail again and again between live workers: which it is, who stands where because of it, and who stays out.

A link that has failed twice is bad. Its two workers are kept apart on the ring. Where that is impossible, or does not
help, one of them is left out for a while and then let in again as a trial: training is the probe. If the link fails
once more, the while is twice as long.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from quorate.coordinator.autopsy import name_enrolled
from quorate.coordinator.places import taking_part
from quorate.coordinator.ring_order import Pair, are_neighbours, pair_of, ring_order
from quorate.coordinator.states import Crew, Enrolled, Suspicion, WeakLink
from quorate.core.failure import Failure
from quorate.core.timing import Timing

BAD_FROM = 2
"""So many failures make a link a bad one."""
FORGIVEN_AFTER = 60
"""So many times `failure_timeout` without a failure, and a link counts as new."""

_MOST_DOUBLINGS = 10


@dataclass(frozen=True)
class LineUp:
    """Who takes part in a generation, in the order of the ring; and who does not, because of which link."""

    ring: tuple[int, ...]
    left_out: dict[int, WeakLink]


def is_bad(link: WeakLink) -> bool:
    """Whether it has failed too often for mere chance."""
    return link.times >= BAD_FROM


def shunned_for(link: WeakLink, timing: Timing) -> float:
    """Seconds from its last failure until it is tried again."""
    return timing.failure_timeout * 2.0 ** min(link.times - 1, _MOST_DOUBLINGS)


# --- which link it is


def blame_link(crew: Crew) -> tuple[Crew, WeakLink | None]:
    """Count the one link whose failure has ended the last generation, if everybody has turned out to be alive."""
    suspicion = crew.suspicion
    pair = _failed_pair(crew.ring, suspicion.symptoms) if suspicion and not crew.is_explained else None
    if suspicion is None or pair is None:
        return crew, None
    link = _once_more(crew, pair, suspicion)
    others = tuple(other for other in crew.links if other.pair != pair)
    return replace(crew, links=(*others, link)), link


def _failed_pair(ring: tuple[int, ...], symptoms: Iterable[Failure]) -> Pair | None:
    """The first pair of which each names the other; else the first that is named.

    Whoever meets a broken link closes its other links too, so an innocent neighbour may name it. It does not name them.
    """
    named = [
        (told.worker, told.peer)
        for told in symptoms
        if told.worker is not None and told.worker in ring and told.peer is not None and told.peer in ring
    ]
    mutual = [(one, other) for one, other in named if (other, one) in named]
    return next((pair_of(one, other) for one, other in (*mutual, *named) if one != other), None)


def _once_more(crew: Crew, pair: Pair, suspicion: Suspicion) -> WeakLink:
    timing = crew.terms.timing
    apart_helps = are_neighbours(pair, crew.ring)
    known = next((link for link in crew.links if link.pair == pair), None)
    if known is not None:
        well_for = suspicion.since - known.failed
        if well_for <= max(2 * shunned_for(known, timing), FORGIVEN_AFTER * timing.failure_timeout):
            return WeakLink(pair, known.times + 1, suspicion.since, known.apart_helps and apart_helps)
    return WeakLink(pair, 1, suspicion.since, apart_helps)


# --- who stands where


def line_up(crew: Crew, now: float) -> LineUp:
    """Everyone that is to take part, by their ids; kept apart where a bad link would join them, or left out if need be.

    As many as min_workers are never left out: then the link is tried as it is.
    """
    present = {known.worker: known for known in taking_part(crew)}
    bad = [link for link in crew.links if is_bad(link)]
    whole = _ring_without(bad, present)
    if whole is not None:
        return LineUp(whole, {})
    shunned = [link for link in bad if now < link.failed + shunned_for(link, crew.terms.timing)]
    fewest = max(1, crew.terms.min_workers if crew.stop is None else 1)
    left_out: dict[int, WeakLink] = {}
    while _ring_without(shunned, present) is None and len(present) > fewest:
        worker, link = _whom_to_leave_out(crew, list(present.values()), _within(shunned, present))
        left_out[worker] = link
        del present[worker]
    # Whom a later choice has made harmless need not stay out.
    for worker in sorted(left_out):
        if _ring_without(shunned, {*present, worker}) is not None:
            known = crew.find(worker)
            assert known is not None, "only those who are enrolled are left out"
            present[worker] = known
            del left_out[worker]
    # What need not be shunned any more is kept apart still if that costs nothing.
    ring = _ring_without(bad, present) or _ring_without(shunned, present)
    return LineUp(ring or tuple(sorted(present)), left_out)


def _within(links: Iterable[WeakLink], workers: Collection[int]) -> list[WeakLink]:
    """The links between two of these workers, and of them first those that no order helps."""
    within = [link for link in links if link.pair[0] in workers and link.pair[1] in workers]
    return [link for link in within if not link.apart_helps] or within


def _ring_without(links: Iterable[WeakLink], workers: Collection[int]) -> tuple[int, ...] | None:
    """An order of these workers in which none of the links is used, if there is one."""
    within = _within(links, workers)
    if not all(link.apart_helps for link in within):
        return None
    return ring_order(workers, [link.pair for link in within])


def _whom_to_leave_out(crew: Crew, present: Sequence[Enrolled], links: Sequence[WeakLink]) -> tuple[int, WeakLink]:
    """Whoever is left out already, or has most of the bad links; else the one with the higher number.

    Never the only one that is furthest: the others would have to do again what it has done.
    """
    counts = Counter(worker for link in links for worker in link.pair)
    furthest = max((known.has_trained, known.cursor) for known in present)
    ahead = [known.worker for known in present if (known.has_trained, known.cursor) == furthest]
    candidates = [worker for worker in counts if ahead != [worker]]
    worker = max(candidates, key=lambda worker: (worker not in crew.ring, counts[worker], worker))
    return worker, next(link for link in links if worker in link.pair)


def who_may_return(crew: Crew, now: float) -> dict[int, WeakLink]:
    """Who is left out of the last generation and could take part in the next, beside all the others."""
    if not crew.links:
        return {}
    next_one = line_up(crew, now)
    return _trials(crew, next_one) if set(crew.ring) <= set(next_one.ring) else {}


def _trials(crew: Crew, next_one: LineUp) -> dict[int, WeakLink]:
    """By worker, the bad link that it was left out for."""
    return {
        worker: link
        for link in crew.links
        for worker in link.pair
        if is_bad(link) and worker in next_one.ring and worker not in crew.ring
    }


# --- what is said of it


def explain_line_up(crew: Crew, blamed: WeakLink | None, chosen: LineUp) -> list[str]:
    """What is done about bad links, each in a sentence that names both workers."""
    timing = crew.terms.timing
    told: list[str] = []
    if blamed is not None and is_bad(blamed) and not set(blamed.pair) & chosen.left_out.keys():
        if blamed.apart_helps and not are_neighbours(blamed.pair, chosen.ring):
            order = ", ".join(map(str, chosen.ring))
            told.append(
                f"{_story(crew, blamed)}: hosting is re-ordered so that they are not neighbours (the ring is {order})."
            )
        else:
            told.append(f"{_story(crew, blamed)}: {explain_stuck(crew)}, so it is tried as it is.")
    for worker, link in chosen.left_out.items():
        if worker in crew.ring:
            why = "they cannot but be neighbours" if link.apart_helps else "it fails also where they are not neighbours"
            told.append(
                f"{_story(crew, link)}: {why}, so worker {worker} is left out for {shunned_for(link, timing):.1f} s."
            )
    for worker, link in _trials(crew, chosen).items():
        told.append(f"{_story(crew, link)}: worker {worker} was left out for that, and is let in again as a trial.")
    return told


def explain_stuck(crew: Crew) -> str:
    """Why nobody is left out although that would help."""
    return f"to leave one out would leave fewer than min_workers ({crew.terms.min_workers})"


def _story(crew: Crew, link: WeakLink) -> str:
    one, other = (name_enrolled(known) for worker in link.pair if (known := crew.find(worker)) is not None)
    return f"the link between {one} and {other} has failed {link.times} times although both are alive"
