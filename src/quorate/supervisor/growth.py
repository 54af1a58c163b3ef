"""How many workers a job is worth having: one more for as long as that pays, by what was measured with each number.

A number is judged once, by its first steps: so a job grows, gives back at most what it has just added, and stays there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from quorate.observe.event import Event
from quorate.observe.events import GenerationFormed, Resized, StepCompleted
from quorate.observe.quantities import plural
from quorate.spec.engine import GrowSpec

WARMING = 3
"""So many steps of a generation are not measured: links are made in them, and caches filled."""
SLOWER = 0.98
"""Below so much of the speed with fewer workers, a job is slower; what lies above may be chance."""


@dataclass(frozen=True)
class Verdict:
    """How many workers a job is to have, and why."""

    workers: int
    reason: str


def decide(rates: Mapping[int, float], workers: int, least: int, most: int, efficiency: float) -> Verdict:
    """With how many workers to go on: one more, as many, or fewer, but at least `least` and at most `most`.

    `rates` has the samples a second by the numbers of workers that were measured. A number is worth it while each of
    its workers is so efficient: while it does that part of what one did with fewer, and the job is no slower.
    """
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
        return Verdict(workers, f"{plural(workers, 'worker')}, as many as there may be: {_speed(rates, workers)}")
    if workers + 1 in rates and (against := _why_not(rates, workers + 1, efficiency)):
        return Verdict(workers, f"{plural(workers, 'worker')} from here on: {against}")
    return Verdict(workers + 1, f"one more is tried: {_speed(rates, workers)}")


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

    def __init__(self, spec: GrowSpec, least: int, most: int) -> None:
        self._spec = spec
        self._least, self._most = least, most
        self._wanted = least
        self._present = 0
        self._rates: dict[int, float] = {}
        self._window: list[float] = []
        self._asked: Verdict | None = None
        self.is_over = False

    def handle(self, event: Event) -> None:
        """Take note of what has happened."""
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
        """What is to be done now, if anything is."""
        if self.is_over or self._asked is not None or self._present != self._wanted:
            return None
        if self._wanted not in self._rates:
            return None
        return decide(self._rates, self._wanted, self._least, self._most, self._spec.efficiency)

    def is_last(self, verdict: Verdict) -> bool:
        """Whether it leaves everything as it is: what was measured stays, so nothing else will follow."""
        return verdict.workers == self._wanted

    def note_asked(self, verdict: Verdict) -> None:
        """It was asked for: until that has come about, nothing else is."""
        self._asked = verdict
