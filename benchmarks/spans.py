"""How long an exchange among processes took. All of them read the same clock: they run on one machine."""

from collections.abc import Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """When one process came to an exchange, and when it had its result, in seconds."""

    start: float
    end: float


def durations_ms(spans: Sequence[Sequence[Span]]) -> list[float]:
    """For each repetition, from the moment the last process came to the moment the last one had its result.

    `spans` has one sequence for each process. What an early process waits for a late one is nobody's fault.
    """
    return [
        (max(span.end for span in everyone) - max(span.start for span in everyone)) * 1000
        for everyone in zip(*spans, strict=True)
    ]
