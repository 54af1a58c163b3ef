"""Which trials there are: numbered in order of proposal, drawn by the search itself or chosen by Optuna; and what is
written down of them."""

from collections import deque
from collections.abc import Callable
from typing import Any

from quorate.checkpoint.retention import Watched, best_of, is_number
from quorate.history.search_log import ENDED, LoggedTrial, SearchLog, TrialStatus
from quorate.spec.search import DimensionSpec, OptunaSpec, SearchSpec
from quorate.storage.search_folder import SearchFolder

Listener = Callable[[dict[str, Any]], None]


class Journal:
    """Writes decisions to the log of a search, and has read it. What is known is not written again: a trial that is
    resumed tells once more what it has told before."""

    def __init__(self, folder: SearchFolder, listener: Listener | None = None) -> None:
        self.folder = folder
        self.log = SearchLog.read(folder.log_file)
        self._listener = listener

    @property
    def trials(self) -> dict[int, LoggedTrial]:
        return self.log.trials

    @property
    def steps(self) -> int:
        """Steps of all trials together, as far as they were told."""
        return sum(trial.now.step for trial in self.trials.values())

    def tell(self, kind: str, trial: int | None = None, **fields: Any) -> None:
        """Write a line, unless it is known."""
        if trial is not None and trial in self.trials and _is_known(self.trials[trial], kind, fields.get("step")):
            return
        line = self.folder.tell(kind, trial, **fields)
        self.log.take(line)
        if self._listener is not None:
            self._listener(line)

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune writes down what it is given, with all that hangs on it, and this is never read back


def reports_of(trial: LoggedTrial) -> dict[int, dict[str, Any]]:
    """All evaluations of a trial, by step."""
    return {step: metrics for part in trial.parts for step, metrics in part.reports.items()}


def _is_known(trial: LoggedTrial, kind: str, step: int | None) -> bool:
    if kind == "proposed" or trial.status in ENDED:
        return True
    if kind == "exploited":
        return any(part.donor is not None and part.from_step == step for part in trial.parts)
    return kind == "reported" and step in reports_of(trial)


class ByOptuna:
    """Optuna's TPE, for one metric or several. It learns also from trials of which another process has asked it."""

    def __init__(self, spec: SearchSpec) -> None:
        assert isinstance(spec.algorithm, OptunaSpec)
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna = optuna
        self._spec = spec
        self._space = {key: _distribution(optuna, dimension) for key, dimension in spec.dimensions.items()}
        # Those under way count as bad ones: otherwise concurrent trials would be drawn close to each other.
        sampler = optuna.samplers.TPESampler(
            n_startup_trials=spec.algorithm.startup_trials, seed=spec.seed % 2**32, constant_liar=True
        )
        directions = ["minimize" if mode == "min" else "maximize" for mode in spec.modes]
        self._study = optuna.create_study(directions=directions, sampler=sampler)
        self._asked: dict[int, Any] = {}

    def choose(self, trial: int) -> dict[str, Any]:
        self._asked[trial] = asked = self._study.ask(self._space)
        return {key: _value(self._spec.dimensions[key], given) for key, given in asked.params.items()}

    def learn(self, trial: LoggedTrial) -> None:
        values = objectives(self._spec, trial)
        states = self._optuna.trial.TrialState
        state = states.FAIL if values is None else states.COMPLETE
        asked = self._asked.pop(trial.number, None)
        if asked is not None:
            self._study.tell(asked, values, state=state)
            return
        given = {key: _given(self._spec.dimensions[key], trial.parts[0].params[key]) for key in self._space}
        self._study.add_trial(
            self._optuna.trial.create_trial(state=state, values=values, params=given, distributions=self._space)
        )


def objectives(spec: SearchSpec, trial: LoggedTrial) -> list[float] | None:
    """What a trial came to: its best evaluation or, of several metrics, the last of them; None if it has failed."""
    reports = reports_of(trial)
    if trial.status is TrialStatus.FAILED or not reports:
        return None
    if len(spec.metrics) == 1:
        best = best_of(reports, Watched(spec.metrics[0], spec.modes[0]))
        return None if best is None else [best.value]
    last = reports[max(reports)]
    values = [last.get(metric) for metric in spec.metrics]
    numbers = [float(value) for value in values if is_number(value) and value == value]
    return numbers if len(numbers) == len(values) else None


def _distribution(optuna: Any, dimension: DimensionSpec) -> Any:
    """Values of a list by their places: they may be anything."""
    distributions = optuna.distributions
    if dimension.kind == "randint":
        return distributions.IntDistribution(int(dimension.low), int(dimension.high), step=int(dimension.step or 1))
    if dimension.values is not None:
        return distributions.CategoricalDistribution(list(range(len(dimension.values))))
    return distributions.FloatDistribution(dimension.low, dimension.high, log=dimension.is_log)


def _value(dimension: DimensionSpec, given: Any) -> Any:
    if dimension.kind == "randint" or dimension.values is None:
        return given if isinstance(given, int) else dimension.within(given)
    return dimension.values[given]


def _given(dimension: DimensionSpec, value: Any) -> Any:
    if dimension.kind == "randint" or dimension.values is None:
        return value
    return dimension.values.index(value)


class TrialSource:
    """Gives the trials that have not ended, those that were proposed before first; with `replay` all of these.

    It has no state of its own to be restored: the journal has all.
    """

    def __init__(self, spec: SearchSpec, journal: Journal, replay: bool = False) -> None:
        self._spec = spec
        self._journal = journal
        self._optuna = ByOptuna(spec) if isinstance(spec.algorithm, OptunaSpec) else None
        known = sorted(journal.trials.values(), key=lambda trial: trial.number)
        self._again = deque(trial.number for trial in known if replay or trial.status not in ENDED)
        for trial in known:
            if trial.status in ENDED and not replay:
                self._learn(trial)
        self._next = max(journal.trials, default=0) + 1
        self.is_over = False

    @property
    def has_more(self) -> bool:
        """Whether there are trials that have not begun."""
        return not self.is_over and (bool(self._again) or self._spec.trials is None or self._next <= self._spec.trials)

    def next(self) -> tuple[int, dict[str, Any]]:
        """The number of a trial, which is in the journal then, and its params."""
        if self._again:
            number = self._again.popleft()
            return number, self._journal.trials[number].parts[0].params
        number, self._next = self._next, self._next + 1
        # Random and grid: each trial by itself.
        params = self._spec.params(number) if self._optuna is None else self._optuna.choose(number)
        self._journal.tell("proposed", number, params=params)
        return number, params

    def again(self, number: int) -> None:
        """Give a trial again, before all others: the process that trained it has died."""
        self._again.appendleft(number)

    def ended(self, number: int) -> None:
        """Learn what a trial has come to."""
        if not self.is_over or self._journal.trials[number].status in ENDED:
            self._learn(self._journal.trials[number])

    def _learn(self, trial: LoggedTrial) -> None:
        if self._optuna is not None:
            self._optuna.learn(trial)
