"""Finding the batch with which something takes a wanted time on this machine."""

from collections.abc import Callable

FIRST = 256
LARGEST = 2**14
"""Samples: more would need gigabytes."""
ATTEMPTS = 3


def calibrated(seconds_of: Callable[[int], float], wanted: float) -> int:
    """How many samples take about the wanted seconds, by going on from one attempt to the next."""
    samples = FIRST
    for _ in range(ATTEMPTS):
        samples = scaled(samples, wanted / seconds_of(samples))
    return samples


def scaled(samples: int, times: float) -> int:
    """So many times the samples. Their time grows about alike: what falls out of the cache takes longer."""
    return max(1, min(LARGEST, round(samples * times)))
