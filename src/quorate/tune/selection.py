"""Which trials of a search end early, here and on Ray, and who goes on from whose checkpoint with which params in
population-based training.

All trials of a population train up to the same step and wait there. Then the worst go on as branches of the best. Who
that is, and what is changed, follows from the evaluations and the seed alone.
"""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quorate.checkpoint.retention import is_number
from quorate.core.digests import derive_seed
from quorate.observe.quantities import measure
from quorate.tune.driver import Journal
from quorate.tune.spec import AshaSpec, DimensionSpec, HyperbandSpec, PbtSpec, SearchSpec
from quorate.tune.trial_run import Report
from quorate.tune.trials import ENDED

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


# --- which trials end early


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
