"""The learning-rate range test: train for a few steps while the rate rises, and see where the loss falls fastest.

It is a training like any other, in a folder that is thrown away. What comes out is a function of the losses alone, so
it is the same on any number of workers.
"""

import math
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quorate.api.evaluate import scratch_folder
from quorate.api.run_part import run_locally
from quorate.api.session import refuse_in_worker
from quorate.api.tasks import TaskLocation
from quorate.core.errors import RequestError, TaskError
from quorate.core.failure import JobFailed
from quorate.core.machine import usable_cores
from quorate.observe.event import Event
from quorate.observe.events import StepCompleted
from quorate.spec.device import workers_here
from quorate.spec.job import JobSpec
from quorate.spec.keys import AUTO_BATCH
from quorate.spec.resolved import ResolvedJob
from quorate.spec.rules import checked_job
from quorate.storage.run_folder import RunFolder
from quorate.supervisor.signals import Signals, listening_to_signals
from quorate.supervisor.supervisor import Launch
from quorate.task.run_mode import RunMode

SMOOTHING = 0.98
DIVERGED = 4.0
"""The test ends where the smoothed loss is so many times its least."""
_FAR = 1e3
"""An optimizer whose rate is so many times the param's, or less than its part, does not use the param."""
_RATES = re.compile(r"(.*_)?(lr|learning_?rate)(_.*)?|rate", re.IGNORECASE)
_FEWEST = 10


@dataclass(frozen=True)
class RateCurve:
    """What was found. `losses` are those of the steps up to where it diverged (or the end), `smoothed` the same.

    `steepest` is the rate at which the smoothed loss falls fastest, `tenth` that of its minimum divided by ten; None if
    it does not fall at all.
    """

    job: str
    param: str
    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    steepest: float | None
    tenth: float | None
    diverged: bool
    left_out: str | None

    @property
    def setting(self) -> str | None:
        """How to train with what was found."""
        return None if self.steepest is None else f"--set params.{self.param}={self.steepest:.2g}"


def find_rate(
    resolved: ResolvedJob, *, first: float = 1e-7, last: float = 10.0, steps: int = 100, param: str | None = None
) -> RateCurve:
    """Train for so many steps at most while the rate rises from `first` to `last`; `param` is the task's learning rate,
    by default the one that is called so. Neither the job nor its folder of runs is touched."""
    refuse_in_worker()
    _check(first, last, steps)
    spec = resolved.spec
    if spec.batch_size == AUTO_BATCH:
        raise RequestError(
            "find-lr needs a number for batch_size, since the best rate depends on it: --set batch_size=64."
        )
    place = TaskLocation(spec.task)
    with place.loaded(spec.seed) as task_type:
        from quorate.task.task import parameters_of

        name = _rate_param(task_type.__name__, parameters_of(task_type), spec.params, param)
    # The job is one step longer, since an evaluation comes at its end; its last rate lies as far beyond the test's.
    beyond = last * (last / first) ** (1 / (steps - 1))
    tested = _tested(spec, name, steps, first, beyond)
    losses = _Losses(first)
    with scratch_folder() as scratch, listening_to_signals() as signals:
        run = RunFolder.create(scratch, spec.name)
        mode = RunMode(until=steps)
        workers = workers_here(tested, usable_cores())
        launch = Launch(run, tested, workers, resolved.source, None, mode, place.reference, place.search_path)
        losses.signals = signals
        outcome = run_locally(launch, losses.take, lambda _: None, signals)
    was_stopped = losses.withdraw_stop()
    if signals.reason is not None:
        raise JobFailed(signals.failure(f"{signals.reason}; nothing was written."))
    if losses.misses_the_optimizer:
        raise TaskError(
            f"The learning rate that find-lr sets does not reach the optimizer: given {first:g} for the first step, "
            f"its rates are {', '.join(f'{rate:g}' for rate in losses.first_rates)}. Use params.{name} for lr in the "
            "optimizer, or name another param with --param."
        )
    if outcome.failure is not None and not (losses.has_diverged or was_stopped):
        raise outcome.failure.error()
    rates = [first * (last / first) ** (step / (steps - 1)) for step in range(steps)]
    return curve_of(spec, name, rates, losses.values)


def curve_of(spec: JobSpec, param: str, rates: Sequence[float], losses: Sequence[float]) -> RateCurve:
    """What the losses of a test come to, up to where they diverge."""
    smoothed = smooth(losses)
    end = divergence(smoothed)
    count = len(smoothed) if end is None else end
    steepest, tenth = suggestions(rates[:count], smoothed[:count])
    left_out = None if spec.schedule is None or spec.schedule.kind is None else spec.schedule.kind
    used = (tuple(rates[:count]), tuple(losses[:count]), tuple(smoothed[:count]))
    return RateCurve(spec.name, param, *used, steepest, tenth, end is not None, left_out)


def smooth(losses: Sequence[float]) -> list[float]:
    """An exponential average that does not begin at zero."""
    mean, found = 0.0, []
    for number, loss in enumerate(losses, 1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        found.append(mean / (1 - SMOOTHING**number))
    return found


def divergence(smoothed: Sequence[float]) -> int | None:
    """After how many steps it has left the ground for good: not finite, or several times the least so far."""
    least = math.inf
    for number, value in enumerate(smoothed):
        if not math.isfinite(value) or (number and value > DIVERGED * least > 0):
            return number
        least = min(least, value)
    return None


def suggestions(rates: Sequence[float], smoothed: Sequence[float]) -> tuple[float | None, float | None]:
    """The rate of the steepest descent before the minimum, and a tenth of that of the minimum; None without a descent.

    The first tenth of the steps does not count: there the average has seen too little.
    """
    begin = len(rates) // 10
    lowest = int(np.argmin(smoothed)) if len(smoothed) else 0
    if lowest <= begin + 1:
        return None, None
    slopes = np.gradient(np.asarray(smoothed[: lowest + 1]), np.log(rates[: lowest + 1]))
    steepest = begin + int(np.argmin(slopes[begin:]))
    return float(rates[steepest]), float(rates[lowest]) / 10


class _Losses:
    """The losses of a test as they come in; asks for the end of the training where they have diverged."""

    signals: Signals

    def __init__(self, first_rate: float) -> None:
        self.values: list[float] = []
        self.first_rates: list[float] = []
        self._first_rate = first_rate
        self._asked = False

    @property
    def has_diverged(self) -> bool:
        return divergence(smooth(self.values)) is not None

    @property
    def misses_the_optimizer(self) -> bool:
        near = [rate for rate in self.first_rates if 1 / _FAR < rate / self._first_rate < _FAR]
        return bool(self.first_rates) and not near

    def take(self, event: Event) -> None:
        if not isinstance(event, StepCompleted) or event.step is None or event.step <= len(self.values):
            return
        self.first_rates = self.first_rates or [rate for rate in event.learning_rates.values() if rate is not None]
        told = list(event.losses.values())
        self.values.append(math.nan if not told or None in told else math.fsum(loss or 0.0 for loss in told))
        is_over = self.has_diverged or self.misses_the_optimizer
        if not self._asked and not self.signals.received and is_over:
            # As a signal would: everybody ends at the same step.
            self._asked = True
            self.signals.received.append(signal.SIGTERM)

    def withdraw_stop(self) -> bool:
        """Whether it was this that has ended the training; from then on the signals are only the user's."""
        if self._asked:
            self.signals.received.pop(0)
        return self._asked


def _check(first: float, last: float, steps: int) -> None:
    if not (0 < first < last < math.inf):
        raise RequestError(f"the rates must rise from above 0: --from {first:g} --to {last:g} does not.")
    if steps < _FEWEST:
        raise RequestError(f"--steps {steps}: a curve needs {_FEWEST} steps at least, and 100 are usual.")


def _rate_param(task: str, fields: Mapping[str, tuple[Any, Any]], params: Mapping[str, Any], asked: str | None) -> str:
    """The param of the task that is its learning rate."""
    numbers = [name for name, (_, default) in fields.items() if isinstance(params.get(name, default), float | int)] + [
        name for name, (kind, default) in fields.items() if default is ... and kind is float and name not in params
    ]
    if asked is not None:
        if asked not in numbers:
            has = f"its numbers are {', '.join(numbers)}" if numbers else "it has no params that are numbers"
            raise RequestError(f"--param {asked}: {task} has no such number among its params; {has}.")
        return asked
    named = [name for name in numbers if _RATES.fullmatch(name)]
    usual = [name for name in named if name in ("lr", "learning_rate")] or named
    if len(usual) == 1:
        return usual[0]
    if usual:
        raise RequestError(f"{task} has several learning rates: {', '.join(usual)}. Name one of them with --param.")
    raise RequestError(
        f"{task} has no param that is a learning rate, which find-lr could set. Add a field `lr: float = 0.1` to it "
        "and use self.lr in optimizer() (a training loop of your own: main(run, lr: float = 0.1)), or name the param "
        "with --param."
    )


def _tested(spec: JobSpec, param: str, steps: int, first: float, last: float) -> JobSpec:
    """The job as it is tested: the same training, without what would end it early or be seen elsewhere."""
    changed = {
        "params": spec.params | {param: last},
        "steps": steps + 1,
        "epochs": None,
        "evaluate": {"every": "end"},
        "early_stop": None,
        "average": None,
        "schedule": {"kind": "range", "final": first / last},
        "lineage": [],
        "on_nonfinite_loss": "skip",
        "checkpoint": {"minutes": 0},
        "engine": "local",
        "callbacks": [],
        "track": None,
        "notify": None,
        "port": 0,
    }
    return checked_job(spec.model_dump() | changed)
