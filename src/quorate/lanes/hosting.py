"""Which worker hosts which lanes."""

from quorate.lanes.chunks import cut


def host_lanes(lanes: int, workers: int) -> tuple[range, ...]:
    """Contiguous lanes for each worker, as even as possible; earlier workers get the larger shares."""
    if not 1 <= workers <= lanes:
        raise ValueError(f"{workers} workers cannot host {lanes} lanes: 1 <= workers <= lanes must hold")
    return tuple(range(share.start, share.stop) for share in cut(lanes, workers))
