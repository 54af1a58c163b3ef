"""One push and pull again and again, the same for every system: a gradient to a server, new values back."""

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any, Protocol

from benchmarks.exchange import part_of
from benchmarks.size import size_in_words
from benchmarks.spans import Span, durations_ms
from benchmarks.told import reading

WARM_UP = 3
WORKER, SERVER = 0, 1
"""The processes."""


class WorkerEnd(Protocol):
    """The worker's part."""

    def fill(self, value: float) -> None:
        """Write the gradient, as a backward pass does."""
        ...

    def push_and_pull(self) -> None:
        """Return when the new values, which are the gradient, can be read here."""
        ...

    def extremes(self) -> tuple[float, float]:
        """The smallest and the largest of the new values, after reading all of them."""
        ...


def ask(worker: WorkerEnd, repeats: int) -> Iterator[Span]:
    """Only the exchange itself is timed; the first few do not count."""
    for number in range(WARM_UP + repeats):
        expected = part_of(WORKER, number)
        worker.fill(expected)
        start = perf_counter()
        worker.push_and_pull()
        end = perf_counter()
        found = worker.extremes()
        if found != (expected, expected):
            raise RuntimeError(f"what comes back in repetition {number} is {found}, and not {expected}")
        if number >= WARM_UP:
            yield Span(start, end)


def serve(answer_one: Callable[[], None], repeats: int) -> Iterator[Span]:
    """A server is there before the worker: when it comes does not count."""
    for number in range(WARM_UP + repeats):
        start = perf_counter()
        answer_one()
        if number >= WARM_UP:
            yield Span(start, perf_counter())


def readings_of(order: dict[str, Any], everyone: Sequence[Sequence[Sequence[Sequence[float]]]]) -> list[dict[str, Any]]:
    """What the spans of worker and server come to, size by size."""
    return [
        reading(
            size_in_words(size),
            len(everyone),
            durations_ms([[Span(*span) for span in process[index]] for process in everyone]),
            size=size,
        )
        for index, size in enumerate(order["sizes"])
    ]
