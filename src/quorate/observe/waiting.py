"""How much of its steps a run spends waiting for data, and which knob to turn where that is much."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
        return self.waited_s / self.step_s if self.step_s else 0.0

    @property
    def is_worth_telling(self) -> bool:
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

    @classmethod
    def of(cls, state: dict[str, Any]) -> "DataWaitLog":
        """One that goes on where another was (`state`), as far as waiting is concerned."""
        log = cls()
        log._waited, log._taken, log._is_first = state["waited"], state["taken"], state["is_first"]
        log._draws = state["draws"]
        return log

    def state(self) -> dict[str, Any]:
        """What it has added up, as JSON has it."""
        return {"waited": self._waited, "taken": self._taken, "is_first": self._is_first, "draws": self._draws}

    @property
    def wait(self) -> DataWait:
        return DataWait(round(self._waited, 6), round(self._taken, 6))

    def advice(self, spec: JobSpec, cores: int) -> str:
        """What may shorten it, on a machine with so many cores."""
        return advice_on_waiting(spec, self._data, self._workers, cores, draws=self._draws)

    def handle(self, event: Event) -> None:
        match event:
            case GenerationFormed():
                self._is_first = True
                self._workers = self._workers if event.members is None else len(event.members)
            case RunBegan():
                self._is_first = True
                self._data = event.data or self._data
            case StepCompleted():
                phases = (event.data_s, event.compute_s, event.exchange_s, event.apply_s)
                self.take_step([each or 0.0 for each in phases], event.longest_data_s or 0.0, event.draws)

    def take_step(self, phases: Sequence[float], longest_wait: float, draws: bool) -> None:
        """A step took so long in data, compute, exchange and apply, and another worker waited so long for data."""
        self._draws = self._draws or draws
        seconds = [max(0.0, phase) for phase in phases]
        # A worker that waits for its data has the others wait for it.
        longest = max(seconds[0], longest_wait)
        if not self._is_first:
            self._waited += min(longest, sum(seconds))
            self._taken += sum(seconds)
        self._is_first = False


def waiting_in_words(share: float, advice: str) -> str:
    """As a line that begins with the word waiting goes on."""
    return f"for data, {share:.0%} of a step: {advice}"


def advice_on_waiting(
    spec: JobSpec, data: TrainingBlocks | None, workers: int | None, cores: int, *, draws: bool = False
) -> str:
    """What to try, with the present values.

    `data` is what a run tells about its training set when it begins, if that is in blocks. `workers` and `cores` are of
    one machine, None and 0 where that is not known. `draws`: random numbers are drawn for samples, so that none is the
    same in the next epoch.
    """
    shards = None if data is None else data.reading
    tries = []
    # Loaders are for the code of the task, and none of it runs for columns.
    if shards is None or not shards.columns:
        has_free_cores = not workers or not cores or workers * (spec.threads + spec.loader_workers) < cores
        more_loaders = f"more loader_workers (now {spec.loader_workers})"
        tries.append(more_loaders if has_free_cores else f"more cores (all {cores} are in use)")
        if spec.loader_workers:
            tries.append(f"a larger loader_prefetch (now {spec.loader_prefetch})")
    if shards is not None and not shards.cache and (shards.remote or (shards.decode and not draws)):
        tries.append("cache= of quorate.Shards")
    if data is not None and data.window != 1:
        tries += _of_window(data.window, shards, -(-spec.lanes // max(1, workers or 0)))
    *before, last = tries or ["faster storage or more cores"]
    return f"{', '.join(before)} or {last} may help" if before else f"{last} may help"


def _of_window(window: int, shards: ShardReading | None, lanes: int) -> list[str]:
    if shards is None:
        return [f"a smaller window of the training set (now {window:,})"]
    is_too_large = lanes * shards.window_bytes > shards.memory_bytes
    return [f"a smaller window= of quorate.Shards (now {window:,})"] if is_too_large else []
