"""What the clock of another machine says, from requests and replies that carry its time."""

from dataclasses import dataclass

DRIFT = 1e-4
"""Seconds by which two clocks may part within a second; quartz keeps a tenth of it, and adjusting a clock adds some."""


@dataclass(frozen=True)
class ClockOffset:
    """How far the other clock is ahead of ours, give or take the uncertainty."""

    seconds: float
    uncertainty: float


class RemoteClock:
    """Follows another machine's clock.

    The time that a reply carries was read between the sending of its request and its arrival, so each round trip
    bounds the offset: the shortest is the best. What was found long ago is worth less, since clocks drift; and where
    the other clock was set, what contradicts it is forgotten. Ours never jumps: it is a monotonic one.
    """

    def __init__(self) -> None:
        self._best: ClockOffset | None = None
        self._found = 0.0
        self._source = 0

    def add(self, sent: float, remote: float, received: float, source: int = 0) -> None:
        """One round trip. `source` tells one remote clock from a later one in its place, whose time counts alone."""
        if source < self._source:
            return
        offset = ClockOffset(remote - (sent + received) / 2, max(0.0, received - sent) / 2)
        known = self.offset(received)
        if (
            known is None
            or source > self._source
            or offset.uncertainty <= known.uncertainty
            or abs(offset.seconds - known.seconds) > offset.uncertainty + known.uncertainty
        ):
            self._best, self._found, self._source = offset, received, source

    def offset(self, now: float) -> ClockOffset | None:
        """As it is known by now; None before the first reply."""
        if self._best is None:
            return None
        return ClockOffset(self._best.seconds, self._best.uncertainty + max(0.0, now - self._found) * DRIFT)
