"""How much of its steps a run spends waiting for data."""

from dataclasses import dataclass
from typing import Any

from quorate.observe.data_knobs import Knobs
from quorate.observe.event import Event
from quorate.spec.job import JobSpec

PHASES = ("data", "compute", "exchange", "apply")
LARGEST_SILENT_SHARE = 0.05
"""Of the time of a step: what is below is no reason to change anything, ..."""
SHORTEST = 1.0
"""... nor is a job that has waited less than so many seconds in all."""


@dataclass(frozen=True)
class DataWait:
    """Seconds that steps took in all their phases, and how many of them the worker that waits most waited for data."""

    waited_s: float
    step_s: float

    @property
    def share(self) -> float:
        """Of the time of a step."""
        return self.waited_s / self.step_s if self.step_s else 0.0

    @property
    def is_worth_telling(self) -> bool:
        """Whether there is something to gain."""
        return self.share > LARGEST_SILENT_SHARE and self.waited_s >= SHORTEST


NO_WAIT = DataWait(0.0, 0.0)


class DataWaitLog:
    """Follows a run's events, however many. The first step of a generation is left out: what is read ahead later is
    read for the first time there."""

    def __init__(self) -> None:
        self._waited = self._taken = 0.0
        self._is_first = True
        self._data: Any = None
        self._workers: int | None = None
        self._draws = False

    @property
    def wait(self) -> DataWait:
        """So far."""
        return DataWait(round(self._waited, 6), round(self._taken, 6))

    def advice(self, spec: JobSpec, cores: int) -> str:
        """What may shorten it, on a machine with so many cores."""
        return Knobs.of(spec, self._data, self._workers, cores, draws=self._draws).advice

    def take_in(self, event: Event) -> None:
        """Learn from an event."""
        if event.kind in ("generation", "run"):
            self._is_first = True
            members = event.fields.get("members")
            self._workers = len(members) if isinstance(members, list) else self._workers
            self._data = event.fields.get("data", self._data)
        elif event.kind == "step":
            self._draws = self._draws or event.fields.get("draws") is True
            seconds = [_seconds(event.fields.get(f"{phase}_s")) for phase in PHASES]
            # A worker that waits for its data has the others wait for it.
            longest = max(seconds[0], _seconds(event.fields.get("longest_data_s")))
            if not self._is_first:
                self._waited += min(longest, sum(seconds))
                self._taken += sum(seconds)
            self._is_first = False


def waiting_in_words(share: float, advice: str) -> str:
    """As a line that begins with the word waiting goes on."""
    return f"for data, {share:.0%} of a step: {advice}"


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 else 0.0
