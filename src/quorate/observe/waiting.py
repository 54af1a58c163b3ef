"""How much of its steps a run spends waiting for data, and which knob to turn."""

from dataclasses import dataclass
from typing import Any, Self

from quorate.observe.event import Event

PHASES = ("data", "compute", "exchange", "apply")
WORTH_TELLING = 0.05
"""Of the time of a step: what is below is no reason to change anything, ..."""
SHORTEST = 1.0
"""... nor is a job that has waited less than so many seconds in all."""


@dataclass(frozen=True)
class DataWait:
    """Seconds that steps took in all their phases, and how many of them were waiting for data."""

    waited_s: float
    step_s: float

    @property
    def share(self) -> float:
        """Of the time of a step."""
        return self.waited_s / self.step_s if self.step_s else 0.0

    @property
    def is_worth_telling(self) -> bool:
        """Whether there is something to gain."""
        return self.share > WORTH_TELLING and self.waited_s >= SHORTEST


NO_WAIT = DataWait(0.0, 0.0)


class DataWaitLog:
    """Follows a run's events, however many. The first step of a generation is left out: what is read ahead later is
    read for the first time there."""

    def __init__(self) -> None:
        self._waited = self._taken = 0.0
        self._is_first = True

    @property
    def wait(self) -> DataWait:
        """So far."""
        return DataWait(round(self._waited, 6), round(self._taken, 6))

    def take_in(self, event: Event) -> None:
        """Learn from an event."""
        if event.kind in ("generation", "run"):
            self._is_first = True
        elif event.kind == "step":
            seconds = [_seconds(event.fields.get(f"{phase}_s")) for phase in PHASES]
            if not self._is_first:
                self._waited += seconds[0]
                self._taken += sum(seconds)
            self._is_first = False


@dataclass(frozen=True)
class Knobs:
    """What a job is set to where waiting for data depends on it; `window` is that of shards, None for other data."""

    loader_workers: int
    loader_prefetch: int
    window: int | None = None

    @classmethod
    def of(cls, loader_workers: int, loader_prefetch: int, data: Any) -> Self:
        """`data` is what a run tells about its training set when it begins, if that is in shards."""
        window = data.get("window") if isinstance(data, dict) else None
        return cls(loader_workers, loader_prefetch, window if type(window) is int else None)

    @property
    def advice(self) -> str:
        """What to try, with the present values."""
        tries = [f"more loader_workers (now {self.loader_workers})"]
        if self.loader_workers:
            tries.append(f"a larger loader_prefetch (now {self.loader_prefetch})")
        if self.window is not None:
            tries.append("cache= of quorate.Shards")
            tries.append(f"a smaller window= of it (now {self.window:,})")
        *before, last = tries
        return f"{', '.join(before)} or {last} may help" if before else f"{last} may help"


def waiting_in_words(share: float, advice: str) -> str:
    """As a line that begins with the word waiting goes on."""
    return f"for data, {share:.0%} of a step: {advice}"


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 else 0.0
