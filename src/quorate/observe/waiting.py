"""How much of its steps a run spends waiting for data, and which knob to turn where that is much."""

from dataclasses import dataclass
from typing import Self

from quorate.observe.event import Event
from quorate.observe.events import GenerationFormed, RunBegan, ShardReading, StepCompleted, TrainingBlocks
from quorate.spec.job import JobSpec

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
        self._data: TrainingBlocks | None = None
        self._workers: int | None = None
        self._draws = False

    @property
    def wait(self) -> DataWait:
        """So far."""
        return DataWait(round(self._waited, 6), round(self._taken, 6))

    def advice(self, spec: JobSpec, cores: int) -> str:
        """What may shorten it, on a machine with so many cores."""
        return Knobs.of(spec, self._data, self._workers, cores, draws=self._draws).advice

    def handle(self, event: Event) -> None:
        """Learn from an event."""
        match event:
            case GenerationFormed():
                self._is_first = True
                self._workers = self._workers if event.members is None else len(event.members)
            case RunBegan():
                self._is_first = True
                self._data = event.data or self._data
            case StepCompleted():
                self._take_step(event)

    def _take_step(self, step: StepCompleted) -> None:
        self._draws = self._draws or step.draws
        seconds = [max(0.0, phase or 0.0) for phase in (step.data_s, step.compute_s, step.exchange_s, step.apply_s)]
        # A worker that waits for its data has the others wait for it.
        longest = max(seconds[0], step.longest_data_s or 0.0)
        if not self._is_first:
            self._waited += min(longest, sum(seconds))
            self._taken += sum(seconds)
        self._is_first = False


def waiting_in_words(share: float, advice: str) -> str:
    """As a line that begins with the word waiting goes on."""
    return f"for data, {share:.0%} of a step: {advice}"


@dataclass(frozen=True)
class Knobs:
    """What a job is set to where waiting for data depends on it, and on what it runs.

    `window` is that of a training set in blocks, None for others. `workers` and `cores` are of one machine, 0 where
    that is not known. `draws`: random numbers are drawn for samples, so that none is the same in the next epoch.
    """

    loader_workers: int
    loader_prefetch: int
    window: int | None = None
    shards: ShardReading | None = None
    lanes: int = 1
    threads: int = 1
    workers: int = 0
    cores: int = 0
    draws: bool = False

    @classmethod
    def of(
        cls, spec: JobSpec, data: TrainingBlocks | None, workers: int | None, cores: int, *, draws: bool = False
    ) -> Self:
        """`data` is what a run tells about its training set when it begins, if that is in blocks."""
        return cls(
            spec.loader_workers,
            spec.loader_prefetch,
            None if data is None else data.window,
            None if data is None else data.reading,
            spec.lanes,
            spec.threads,
            workers or 0,
            cores,
            draws,
        )

    @property
    def advice(self) -> str:
        """What to try, with the present values."""
        tries = [*self._of_loaders(), *self._of_cache(), *self._of_window()]
        if not tries:
            return "faster storage or more cores may help"
        *before, last = tries
        return f"{', '.join(before)} or {last} may help" if before else f"{last} may help"

    def _of_loaders(self) -> list[str]:
        if self.shards is not None and self.shards.columns:
            return []  # loaders are for the code of the task, and none of it runs for these
        if self._has_free_cores:
            tries = [f"more loader_workers (now {self.loader_workers})"]
        else:
            tries = [f"more cores (all {self.cores} are in use)"]
        return [*tries, f"a larger loader_prefetch (now {self.loader_prefetch})"] if self.loader_workers else tries

    @property
    def _has_free_cores(self) -> bool:
        return not self.workers or not self.cores or self.workers * (self.threads + self.loader_workers) < self.cores

    def _of_cache(self) -> list[str]:
        shards = self.shards
        has_decoded = shards is not None and shards.decode and not self.draws
        is_of_use = shards is not None and not shards.cache and (shards.remote or has_decoded)
        return ["cache= of quorate.Shards"] if is_of_use else []

    def _of_window(self) -> list[str]:
        if self.window is None or self.window == 1:
            return []
        if self.shards is None:
            return [f"a smaller window of the training set (now {self.window:,})"]
        lanes = -(-self.lanes // max(1, self.workers))
        is_too_large = lanes * self.shards.window_bytes > self.shards.memory_bytes
        return [f"a smaller window= of quorate.Shards (now {self.window:,})"] if is_too_large else []
