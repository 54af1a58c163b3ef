"""The order in which lanes are summed: a fact of the job, whoever hosts them."""


def summation_order(chunk: int, lanes: int) -> tuple[int, ...]:
    """Lane `chunk` + 1, then the next, round the ring of lanes to lane `chunk` itself."""
    return tuple((chunk + 1 + distance) % lanes for distance in range(lanes))
