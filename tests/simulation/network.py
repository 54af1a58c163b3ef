"""A network that delays, reorders, duplicates and loses messages, and that can be cut in two."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from simulation.clock import Deed, Process, VirtualClock

TYPICAL = 0.0005
"""Seconds that a message usually takes."""


@dataclass(frozen=True)
class Weather:
    """How a message fares: the chance to be lost, to be duplicated, to be late, and by how much at most."""

    loss: float = 0.0
    duplication: float = 0.0
    lateness: float = 0.0
    latest: float = 0.0


class Network:
    """Carries messages between places, under the weather of the moment."""

    def __init__(self, clock: VirtualClock, chance: random.Random) -> None:
        self._clock = clock
        self._chance = chance
        self._cuts: list[tuple[frozenset[str], frozenset[str]]] = []
        self.weather = Weather()
        self.sent = 0
        self.lost = 0

    def cut(self, left: frozenset[str], right: frozenset[str]) -> Deed:
        """Let nothing pass between two sets of places; the deed that mends it."""
        both = (left, right)
        self._cuts.append(both)
        return lambda: self._cuts.remove(both)

    def send(self, source: Process, target: Process, deliver: Deed, on_loss: Callable[[], None] | None = None) -> None:
        """Have a message arrive sooner or later, once, twice or never.

        A sender that speaks over a connection gives `on_loss`: there a lost message is a broken connection.
        """
        self.sent += 1
        weather, chance = self.weather, self._chance
        if self._is_cut(source.place, target.place) or (weather.loss and chance.random() < weather.loss):
            self.lost += 1
            if on_loss is not None:
                self._clock.after(self._delay(), on_loss)
            return
        self._clock.after(self._delay(), lambda: target.do(deliver))
        if weather.duplication and chance.random() < weather.duplication:
            self._clock.after(self._delay() + self._delay(), lambda: target.do(deliver))

    def _is_cut(self, source: str, target: str) -> bool:
        return any(
            (source in left and target in right) or (source in right and target in left) for left, right in self._cuts
        )

    def _delay(self) -> float:
        chance, weather = self._chance, self.weather
        if weather.lateness and chance.random() < weather.lateness:
            return chance.uniform(TYPICAL, weather.latest)
        return TYPICAL * (0.5 + chance.random())
