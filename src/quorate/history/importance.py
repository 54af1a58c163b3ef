"""How much each key of a search matters for its metric, by Optuna's PED-ANOVA where that is installed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quorate.checkpoint.retention import is_number
from quorate.history.search_record import SearchRecord, TrialRecord
from quorate.spec.space import RANGES, DimensionSpec

FEWEST = 10
"""Trials from which on shares say something."""
ENOUGH = 30
"""Trials from which on they are more than a hint."""
_GROUPS = 4


@dataclass(frozen=True)
class Importance:
    """Shares of the keys, the greatest first, and how they were found; or why nothing can be said."""

    shares: Mapping[str, float]
    method: str
    trials: int
    missing: str = ""


def importance_of(record: SearchRecord, with_optuna: bool = True) -> Importance:
    """By all trials that have been evaluated: of those that were stopped, how far they came counts as well.

    Without Optuna it is there at once: that takes seconds to import.
    """
    trials = record.ranked
    keys = [key for key in record.keys if len({repr(trial.params.get(key)) for trial in trials}) > 1]
    if len(trials) < FEWEST:
        return Importance({}, "", len(trials), f"too few trials to tell: {len(trials)} of at least {FEWEST}")
    if not keys:
        return Importance({}, "", len(trials), "the trials do not differ in any key")
    # By its place among all: a single trial that has diverged must not decide.
    places = {trial.number: float(place) for place, trial in enumerate(trials)}
    values = {key: [trial.params.get(key) for trial in trials] for key in keys}
    method = "Optuna's PED-ANOVA: what sets the best tenth apart"
    found = _by_optuna(record, trials, keys) if with_optuna else None
    if found is None:
        found = {key: explained(values[key], [places[trial.number] for trial in trials]) for key in keys}
        method = "the share of the ranking that each key explains by itself"
    whole = sum(found.values())
    if not whole:
        return Importance({}, method, len(trials), "no key explains which trials are better")
    shares = {key: found[key] / whole for key in sorted(keys, key=lambda key: -found[key])}
    return Importance(shares, method if len(trials) >= ENOUGH else f"{method}; so few are a hint only", len(trials))


def explained(values: Sequence[Any], ranks: Sequence[float]) -> float:
    """The share of the variance of ranks that lies between groups of values (epsilon squared, 0 to 1): numbers in
    quarters, other values each by itself. What chance alone would explain is taken off."""
    groups: dict[Any, list[float]] = {}
    for value, rank in zip(_grouped(values), ranks, strict=True):
        groups.setdefault(value, []).append(rank)
    count, mean = len(ranks), math.fsum(ranks) / len(ranks)
    total = math.fsum((rank - mean) ** 2 for rank in ranks)
    within = math.fsum((rank - math.fsum(group) / len(group)) ** 2 for group in groups.values() for rank in group)
    free = count - len(groups)
    if not total or free <= 0 or len(groups) < 2:
        return 0.0
    return max(0.0, (total - within - (len(groups) - 1) * within / free) / total)


def _grouped(values: Sequence[Any]) -> list[Any]:
    distinct = sorted({value for value in values if is_number(value)})
    if len(distinct) <= _GROUPS or not all(is_number(value) for value in values):
        return [repr(value) for value in values]
    in_order = sorted(values)
    edges = [in_order[len(values) * part // _GROUPS] for part in range(1, _GROUPS)]
    return [sum(value >= edge for edge in edges) for value in values]


def _by_optuna(record: SearchRecord, trials: Sequence[TrialRecord], keys: Sequence[str]) -> dict[str, float] | None:
    """None where Optuna is not installed, or a key has no space that it knows."""
    try:
        import optuna
    except ImportError:
        return None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = {key: _distribution(optuna, record.space.get(key)) for key in keys}
    if None in distributions.values() or any(not each.params.keys() >= {*keys} for each in trials):
        return None
    study = optuna.create_study(direction="minimize" if record.objectives[0].mode == "min" else "maximize")
    try:
        for trial in trials:
            params = {key: _plain(record.space[key], trial.params[key]) for key in keys}
            study.add_trial(
                optuna.trial.create_trial(params=params, distributions=distributions, value=trial.values[0])
            )
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        found = optuna.importance.get_param_importances(study, evaluator=evaluator)
    except ValueError:  # params outside of their space, as population-based training may move them
        return None
    shares = {key: max(0.0, float(found.get(key, 0.0))) for key in keys}
    return shares if all(map(math.isfinite, shares.values())) else None


def _distribution(optuna: Any, dimension: DimensionSpec | None) -> Any:
    if dimension is None:
        return None
    if dimension.kind not in RANGES:
        values = dimension.values or []
        ordered = all(is_number(value) for value in values)
        return optuna.distributions.CategoricalDistribution([value if ordered else repr(value) for value in values])
    low, high = dimension.low, dimension.high
    if dimension.kind == "randint":
        return optuna.distributions.IntDistribution(int(low), int(high), step=int(dimension.step or 1))
    # Optuna knows no step on a logarithmic scale.
    step = None if dimension.is_log else dimension.step
    return optuna.distributions.FloatDistribution(low, high, log=dimension.is_log, step=step)


def _plain(dimension: DimensionSpec, value: Any) -> Any:
    if dimension.kind in RANGES:
        return value
    ordered = all(is_number(each) for each in dimension.values or [])
    return value if ordered else repr(value)
