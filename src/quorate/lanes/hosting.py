"""Which worker hosts which lanes."""

from itertools import pairwise


def host_lanes(lanes: int, workers: int) -> tuple[range, ...]:
    """Contiguous lanes for each worker, as even as possible; earlier workers get the larger shares."""
    if not 1 <= workers <= lanes:
        raise ValueError(f"{workers} workers cannot host {lanes} lanes: 1 <= workers <= lanes must hold")
    share, larger = divmod(lanes, workers)
    starts = [worker * share + min(worker, larger) for worker in range(workers + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(starts))
