"""How many workers a job is worth having: more for as long as that pays, by what was measured with each number.

A number is judged once, by its first steps: so a job grows, gives back at most what it has just added, and stays there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from quorate.observe.event import Event
from quorate.observe.events import GenerationFormed, Resized, StepCompleted
from quorate.observe.quantities import plural
from quorate.spec.options import GrowSpec

WARMING = 3
"""So many steps of a generation are not measured: links are made in them, and caches filled."""
SLOWER = 0.98
"""Below so much of the speed with fewer workers, a job is slower; what lies above may be chance."""


@dataclass(frozen=True)
class Verdict:
    """How many workers a job is to have, and why."""

    workers: int
    reason: str


def numbers_of_use(lanes: int, least: int, most: int) -> tuple[int, ...]:
    """The numbers of workers to choose from: those with which nobody hosts as many lanes as somebody did with fewer.

    A step takes as long as whoever hosts most lanes. Of 8 lanes one of 7 workers still hosts two, as each of 4 does:
    those between would be as slow as 4, and 8, which are twice as fast, would never be tried.
    """
    return tuple(n for n in range(least, most + 1) if n == least or -(-lanes // n) < -(-lanes // (n - 1)))


def decide(rates: Mapping[int, float], workers: int, numbers: Sequence[int], efficiency: float) -> Verdict:
    """With how many workers to go on: the next of these numbers, as many as now, or fewer.

    `rates` has the samples a second by the numbers of workers that were measured. A number is worth it while each of
    its workers is so efficient: while it does that part of what one did with fewer, and the job is no slower.
    """
    least, most = numbers[0], numbers[-1]
    if not least <= workers <= most:
        near = min(max(workers, least), most)
        return Verdict(near, f"there are to be {least} to {most} workers")
    if workers not in rates:
        return Verdict(workers, f"{plural(workers, 'worker')}: not measured yet")
    against = _why_not(rates, workers, efficiency)
    if against:
        fewer = [number for number in rates if least <= number < workers and not _why_not(rates, number, efficiency)]
        return Verdict(max(fewer, default=least), against)
    if workers == most:
        return Verdict(workers, f"{plural(workers, 'worker')}, as many as are of use: {_speed(rates, workers)}")
    more = next(number for number in numbers if number > workers)
    if more in rates and (against := _why_not(rates, more, efficiency)):
        return Verdict(workers, f"{plural(workers, 'worker')} from here on: {against}")
    tried = "one more is" if more == workers + 1 else f"{more - workers} more are"
    return Verdict(more, f"{tried} tried: {_speed(rates, workers)}")


def _why_not(rates: Mapping[int, float], workers: int, efficiency: float) -> str:
    """What speaks against so many workers; nothing if they are worth it."""
    fewer = [number for number in rates if number < workers]
    if not fewer:
        return ""
    fastest = max(fewer, key=lambda number: rates[number])
    if rates[workers] < SLOWER * rates[fastest]:
        return f"{_speed(rates, workers)}, which is slower than with {fastest} ({rates[fastest]:,.0f} samples/s)"
    best = max(fewer, key=lambda number: rates[number] / number)
    each = (rates[workers] / workers) / (rates[best] / best)
    if each < efficiency:
        return (
            f"{_speed(rates, workers)}, each {each:.0%} of what one did with {best}, less than engine.grow.efficiency "
            f"({efficiency:g})"
        )
    return ""


def _speed(rates: Mapping[int, float], workers: int) -> str:
    return f"{plural(workers, 'worker')} {'compute' if workers > 1 else 'computes'} {rates[workers]:,.0f} samples/s"


class Growth:
    """Measures a job by its events, and says when it is to have another number of workers.

    Whoever resizes the job by hand has the last word: from then on it stays as it is.
    """

    def __init__(self, spec: GrowSpec, numbers: Sequence[int]) -> None:
        """It has the first of these numbers of workers, and may have any of them."""
        self._spec = spec
        self._numbers = numbers
        self._wanted = numbers[0]
        self._present = 0
        self._rates: dict[int, float] = {}
        self._window: list[float] = []
        self._asked: Verdict | None = None
        self.is_over = False

    def handle(self, event: Event) -> None:
        match event:
            case GenerationFormed():
                self._present, self._window = len(event.computing), []
            case Resized():
                self._wanted, self._asked = event.workers or self._wanted, None
                self.is_over = self.is_over or event.reason is None
            case StepCompleted(samples_per_second=float(speed)):
                self._window.append(speed)
                # Without those who are on the way, or lost, it is another number that is measured.
                if len(self._window) == WARMING + self._spec.steps:
                    self._rates.setdefault(self._present, median(self._window[WARMING:]))

    def verdict(self) -> Verdict | None:
        if self.is_over or self._asked is not None or self._present != self._wanted:
            return None
        if self._wanted not in self._rates:
            return None
        return decide(self._rates, self._wanted, self._numbers, self._spec.efficiency)

    def is_last(self, verdict: Verdict) -> bool:
        """Whether it leaves everything as it is: what was measured stays, so nothing else will follow."""
        return verdict.workers == self._wanted

    def note_asked(self, verdict: Verdict) -> None:
        """It was asked for: until that has come about, nothing else is."""
        self._asked = verdict
