"""One all-reduce again and again, the same for every system, and its sum checked each time."""

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any, Protocol

from benchmarks.size import size_in_words
from benchmarks.spans import Span, durations_ms
from benchmarks.told import reading

WARM_UP = 3


class Exchange(Protocol):
    """One process's part in an all-reduce over flat float32 gradients."""

    def fill(self, value: float) -> None:
        """Write the gradient of this process, as a backward pass does."""
        ...

    def reduce(self) -> None:
        """Return when the sum can be read here."""
        ...

    def extremes(self) -> tuple[float, float]:
        """The smallest and the largest value of the sum, after reading all of it."""
        ...


def exchange_all(order: dict[str, Any], process: int, exchange_of: Callable[[int], Exchange]) -> list[list[Span]]:
    """One process's spans for every size; `exchange_of` is called with the place of a size in the order."""
    return [
        list(_spans(exchange_of(index), process, order["processes"], repeats))
        for index, repeats in enumerate(order["repeats"])
    ]


def readings_of(order: dict[str, Any], everyone: Sequence[Sequence[Sequence[Sequence[float]]]]) -> list[dict[str, Any]]:
    """What the spans of all processes come to, size by size."""
    return [
        reading(
            size_in_words(size),
            order["processes"],
            durations_ms([[Span(*span) for span in process[index]] for process in everyone]),
            size=size,
        )
        for index, size in enumerate(order["sizes"])
    ]


def part_of(process: int, repetition: int) -> float:
    """What a process contributes: another value each time, so that an old sum is not taken for a new one."""
    return float((process + 1) * (1 + repetition % 5))


def sum_of(processes: int, repetition: int) -> float:
    """What all of them come to."""
    return sum(part_of(process, repetition) for process in range(processes))


def _spans(exchange: Exchange, process: int, processes: int, repeats: int) -> Iterator[Span]:
    """Only the exchange itself is timed; the first few do not count."""
    for number in range(WARM_UP + repeats):
        exchange.fill(part_of(process, number))
        start = perf_counter()
        exchange.reduce()
        end = perf_counter()
        expected = sum_of(processes, number)
        found = exchange.extremes()
        if found != (expected, expected):
            raise RuntimeError(
                f"the sum of repetition {number} is {found[0]} to {found[1]} where all of it must be {expected}"
            )
        if number >= WARM_UP:
            yield Span(start, end)
