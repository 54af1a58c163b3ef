"""What is chosen by what trials came to: params by Optuna's TPE, by its pruners which trials end early (here and on
Ray), and who goes on from whose checkpoint in population-based training.

All trials of a population train up to the same step and wait there. Then the worst go on as branches of the best. Who
that is, and what is changed, follows from the evaluations and the seed alone.
"""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quorate.checkpoint.retention import Watched, best_of, is_number
from quorate.core.digests import derive_seed
from quorate.observe.quantities import measure
from quorate.tune.spec import AshaSpec, DimensionSpec, HyperbandSpec, OptunaSpec, PbtSpec, SearchSpec
from quorate.tune.trial_run import Report
from quorate.tune.trials import ENDED, Journal, Trial, TrialStatus


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

    def learn(self, trial: Trial) -> None:
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


def objectives(spec: SearchSpec, trial: Trial) -> list[float] | None:
    """What a trial came to: its best evaluation or, of several metrics, the last of them; None if it has failed."""
    reports = trial.reports
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


class Pruner:
    """Which trials end early, by Optuna's pruners: they judge by the evaluations that are in a study in memory.

    Without `grace` the first evaluation of the first trial is the first rung. A trial at its last step is let be: there
    is nothing to save. What trials of an earlier part of the search have come to counts as if they had told it now.
    """

    def __init__(self, spec: SearchSpec, journal: Journal) -> None:
        self._spec = spec
        self._earlier = {each.number: each.reports for each in journal.trials.values() if each.status in ENDED}
        self._study: Any = None
        self._trials: list[Any] = []

    def judge(self, number: int, report: Report) -> str:
        """Why a trial ends with this evaluation; empty if it goes on."""
        rule, name, total = self._spec.scheduler, self._spec.metrics[0], report.total_steps or report.step
        if not isinstance(rule, AshaSpec | HyperbandSpec) or report.step >= total:
            return ""
        if self._study is None:
            self._begin(rule, report.step, total)
        value = report.metrics.get(name)
        if not self._is_pruned(number, report.step, value):
            return ""
        return (
            f"{rule.kind}: {name} {measure(value)} at step {report.step} is not among the best 1/{rule.reduction} there"
        )

    def _begin(self, rule: AshaSpec | HyperbandSpec, step: int, total: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        first = min([step, *(told for reports in self._earlier.values() for told in reports)])
        pruner = (
            optuna.pruners.SuccessiveHalvingPruner(rule.grace or first, rule.reduction)
            if isinstance(rule, AshaSpec)
            else optuna.pruners.HyperbandPruner(first, total, rule.reduction)
        )
        direction = "minimize" if self._spec.modes[0] == "min" else "maximize"
        # By its name Hyperband distributes the trials over its brackets.
        self._study = optuna.create_study(direction=direction, pruner=pruner, study_name=self._spec.name)
        for number, reports in sorted(self._earlier.items()):
            for at in sorted(reports):
                if at < total:
                    self._is_pruned(number, at, reports[at].get(self._spec.metrics[0]))

    def _is_pruned(self, number: int, step: int, value: Any) -> bool:
        while len(self._trials) < number:
            self._trials.append(self._study.ask())
        self._trials[number - 1].report(value if is_number(value) else math.nan, step)
        return bool(self._trials[number - 1].should_prune())


# --- population-based training

FACTORS = (0.8, 1.2)


@dataclass(frozen=True)
class Exploit:
    """A trial goes on from a checkpoint of another."""

    trial: int
    donor: int
    params: dict[str, Any]
    reason: str


def decide(
    spec: SearchSpec, rule: PbtSpec, step: int, values: Mapping[int, Any], params: Mapping[int, dict[str, Any]]
) -> list[Exploit]:
    """Who exploits whom after a step, by what each trial has reached there; of equals the lower number is better."""
    mode, name = spec.modes[0], spec.metrics[0]

    def rank(trial: int) -> tuple[float, int]:
        value = values[trial]
        if not is_number(value) or math.isnan(value):
            return math.inf, trial
        return (value if mode == "min" else -value), trial

    order = sorted(values, key=rank)
    count = min(math.ceil(len(order) * rule.quantile), len(order) // 2)
    exploits = []
    for trial in sorted(order[len(order) - count :]):
        stream = random.Random(derive_seed(spec.seed, "population", step, trial))
        donor = stream.choice(order[:count])
        if rank(donor)[0] >= rank(trial)[0]:
            continue  # no better: nothing is gained
        changed = {
            key: _explored(dimension, params[donor][key], rule.resample, stream)
            for key, dimension in spec.dimensions.items()
        }
        told = f"{name} {measure(values[trial])} at step {step} is among the worst {count} of {len(order)}"
        reason = f"pbt: {told}: continues from trial {donor} ({measure(values[donor])})"
        exploits.append(Exploit(trial, donor, changed, reason))
    return exploits


def _explored(dimension: DimensionSpec, value: Any, resample: float, stream: random.Random) -> Any:
    """A value near another one, or drawn anew."""
    if stream.random() < resample:
        return dimension.draw(stream)
    factor = stream.choice(FACTORS)
    choices = dimension.values
    if choices is None:
        return dimension.within(value * factor)
    place = choices.index(value) if value in choices else 0
    return choices[min(len(choices) - 1, max(0, place + (1 if factor > 1 else -1)))]
