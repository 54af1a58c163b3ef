"""The order in which workers stand on the ring, so that no two of them are neighbours whose link has failed."""

from collections.abc import Collection, Iterable

Pair = tuple[int, int]
"""Two workers, the lower number first."""


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
