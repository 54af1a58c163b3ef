"""Links that fail again and again between live workers: which it is, who stands where because of it, and who stays out.

A link that has failed twice is bad. Its two workers are kept apart on the ring. Where that is impossible, or does not
help, one of them is left out for a while and then let in again as a trial: training is the probe. If the link fails
once more, the while is twice as long. Everybody is linked to every server, so that of a link with a server it is the
worker that is left out; a link between two servers is tried as it is, and so is any link of a sharded gang, where each
has its place by its number.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from quorate.coordinator.autopsy import name_enrolled
from quorate.coordinator.places import taking_part
from quorate.coordinator.states import Enrolled, Members, Pair, Suspicion, WeakLink
from quorate.core.failure import Failure
from quorate.core.generation import Role
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


def blame_link(members: Members) -> tuple[Members, WeakLink | None]:
    """Count the one link whose failure has ended the last generation, if everybody has turned out to be alive."""
    suspicion = members.suspicion
    if suspicion is None or members.is_explained:
        return members, None
    pair = _failed_pair((*members.ring, *members.at_service), suspicion.symptoms)
    if pair is None:
        return members, None
    link = _once_more(members, pair, suspicion)
    others = tuple(other for other in members.links if other.pair != pair)
    return replace(members, links=(*others, link)), link


def _failed_pair(at_work: tuple[int, ...], symptoms: Iterable[Failure]) -> Pair | None:
    """The first pair of which each names the other; else the first that is named.

    Whoever meets a broken link closes its other links too, so an innocent neighbour may name it. It does not name them.
    """
    named = [
        (told.worker, told.peer)
        for told in symptoms
        if told.worker is not None and told.worker in at_work and told.peer is not None and told.peer in at_work
    ]
    mutual = [(one, other) for one, other in named if (other, one) in named]
    return next((pair_of(one, other) for one, other in (*mutual, *named) if one != other), None)


def _once_more(members: Members, pair: Pair, suspicion: Suspicion) -> WeakLink:
    timing = members.settings.timing
    apart_helps = are_neighbours(pair, members.ring)
    known = next((link for link in members.links if link.pair == pair), None)
    if known is not None:
        well_for = suspicion.since - known.failed
        if well_for <= max(2 * shunned_for(known, timing), FORGIVEN_AFTER * timing.failure_timeout):
            return WeakLink(pair, known.times + 1, suspicion.since, known.apart_helps and apart_helps)
    return WeakLink(pair, 1, suspicion.since, apart_helps)


def line_up(members: Members, now: float) -> LineUp:
    """Everyone that is to take part, by their ids; kept apart where a bad link would join them, or left out if need be.

    As many as min_workers are never left out: then the link is tried as it is.
    """
    present = {known.worker: known for known in taking_part(members)}
    if not members.links:
        return LineUp(tuple(present), {})
    if members.settings.mesh is not None:
        return LineUp(tuple(present), {})
    bad = [link for link in members.links if is_bad(link)]
    whole = _ring_without(bad, present)
    if whole is not None:
        return LineUp(whole, {})
    shunned = [link for link in bad if now < link.failed + shunned_for(link, members.settings.timing)]
    fewest = max(1, members.settings.min_workers if members.stop is None else 1)
    left_out: dict[int, WeakLink] = {}
    while _ring_without(shunned, present) is None and len(present) > fewest:
        worker, link = _whom_to_leave_out(members, list(present.values()), _within(shunned, present))
        left_out[worker] = link
        del present[worker]
    # Whom a later choice has made harmless need not stay out.
    for worker in sorted(left_out):
        if _ring_without(shunned, {*present, worker}) is not None:
            known = members.find(worker)
            assert known is not None, "only those who are enrolled are left out"
            present[worker] = known
            del left_out[worker]
    # What need not be shunned any more is kept apart still if that costs nothing.
    ring = _ring_without(bad, present) or _ring_without(shunned, present)
    return LineUp(ring or tuple(sorted(present)), left_out)


def _within(links: Iterable[WeakLink], workers: Collection[int]) -> list[WeakLink]:
    """The links between two of these workers, or of one with a server; of them first those that no order helps."""
    within = [
        link
        for link in links
        if link.pair[0] in workers and (link.pair[1] in workers or Role.of(link.pair[1]) is Role.SERVER)
    ]
    return [link for link in within if not link.apart_helps] or within


def _ring_without(links: Iterable[WeakLink], workers: Collection[int]) -> tuple[int, ...] | None:
    """An order of these workers in which none of the links is used, if there is one."""
    within = _within(links, workers)
    if not all(link.apart_helps for link in within):
        return None
    return ring_order(workers, [link.pair for link in within])


def _whom_to_leave_out(
    members: Members, present: Sequence[Enrolled], links: Sequence[WeakLink]
) -> tuple[int, WeakLink]:
    """Whoever is left out already, or has most of the bad links; else the one with the higher number.

    Never the only one that is furthest: the others would have to do again what it has done. Servers have it, if any.
    """
    counts = Counter(worker for link in links for worker in link.pair)
    furthest = max((known.has_trained, known.cursor) for known in present)
    ahead = [known.worker for known in present if (known.has_trained, known.cursor) == furthest]
    candidates = [worker for worker in counts if Role.of(worker) is Role.WORKER]
    if not members.settings.servers:
        candidates = [worker for worker in candidates if ahead != [worker]]
    worker = max(candidates, key=lambda worker: (worker not in members.ring, counts[worker], worker))
    return worker, next(link for link in links if worker in link.pair)


def who_may_return(members: Members, now: float) -> dict[int, WeakLink]:
    """Who is left out of the last generation and could take part in the next, beside all the others."""
    if not members.links:
        return {}
    next_one = line_up(members, now)
    return _trials(members, next_one) if set(members.ring) <= set(next_one.ring) else {}


def _trials(members: Members, next_one: LineUp) -> dict[int, WeakLink]:
    """By worker, the bad link that it was left out for."""
    return {
        worker: link
        for link in members.links
        for worker in link.pair
        if is_bad(link) and worker in next_one.ring and worker not in members.ring
    }


def explain_line_up(members: Members, blamed: WeakLink | None, chosen: LineUp) -> list[str]:
    """What is done about bad links, each in a sentence that names both workers."""
    timing = members.settings.timing
    told: list[str] = []
    if blamed is not None and is_bad(blamed) and not set(blamed.pair) & chosen.left_out.keys():
        if blamed.apart_helps and not are_neighbours(blamed.pair, chosen.ring):
            order = ", ".join(map(str, chosen.ring))
            story = _story(members, blamed)
            told.append(f"{story}: hosting is re-ordered so that they are not neighbours (the ring is {order}).")
        else:
            told.append(f"{_story(members, blamed)}: {explain_stuck(members, blamed)}, so it is tried as it is.")
    for worker, link in chosen.left_out.items():
        if worker in members.ring:
            why = "they cannot but be neighbours" if link.apart_helps else "it fails also where they are not neighbours"
            why = "everybody needs every server" if Role.of(link.pair[1]) is Role.SERVER else why
            told.append(
                f"{_story(members, link)}: {why}, so worker {worker} is left out for {shunned_for(link, timing):.1f} s."
            )
    for worker, link in _trials(members, chosen).items():
        told.append(f"{_story(members, link)}: worker {worker} was left out for that, and is let in again as a trial.")
    return told


def explain_stuck(members: Members, link: WeakLink) -> str:
    """Why nobody is left out although that would help."""
    if all(Role.of(one) is Role.SERVER for one in link.pair):
        return "everybody needs every server"
    if members.settings.mesh is not None:
        return "each worker of a sharded gang has its place, and none can be left out"
    return f"to leave one out would leave fewer than min_workers ({members.settings.min_workers})"


def _story(members: Members, link: WeakLink) -> str:
    one, other = (name_enrolled(known) for worker in link.pair if (known := members.find(worker)) is not None)
    return f"the link between {one} and {other} has failed {link.times} times although both are alive"


# --- who stands beside whom


def pair_of(one: int, other: int) -> Pair:
    """Two workers, whichever is named first."""
    return (one, other) if one < other else (other, one)


def are_neighbours(pair: Pair, ring: tuple[int, ...]) -> bool:
    """Whether two workers stand next to each other."""
    return pair in {pair_of(one, ring[index - 1]) for index, one in enumerate(ring)}


def ring_order(workers: Iterable[int], bad_links: Collection[Pair]) -> tuple[int, ...] | None:
    """The workers in an order in which no bad link joins two neighbours, by their numbers where nothing is against it.

    None if there is no such order: two or three workers are all neighbours of each other, however they stand.
    """
    waiting = sorted(workers)
    if len(waiting) <= 1:
        return tuple(waiting)
    bad = {pair_of(*link) for link in bad_links}
    good = {one: {other for other in waiting if other != one and pair_of(one, other) not in bad} for one in waiting}
    # Seen at once, where trying would take long: somebody has too few to stand between.
    if any(len(others) < min(2, len(waiting) - 1) for others in good.values()):
        return None
    return _extend((waiting[0],), frozenset(waiting[1:]), good)


def _extend(begun: tuple[int, ...], waiting: frozenset[int], good: dict[int, set[int]]) -> tuple[int, ...] | None:
    """The ring that begins like this and goes on with all who wait, if there is one."""
    if not waiting:
        return begun if begun[0] in good[begun[-1]] else None
    # Whoever has the fewest to stand beside comes first: at the end it would fit nowhere.
    for one in sorted(waiting & good[begun[-1]], key=lambda one: (len(good[one] & waiting), one)):
        whole = _extend((*begun, one), waiting - {one}, good)
        if whole is not None:
            return whole
    return None
