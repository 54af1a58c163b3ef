"""How much each key of a search matters for its metric: the share of the ranking that it explains by itself."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quorate.checkpoint.retention import is_number
from quorate.history.search_record import SearchRecord

FEWEST = 10
"""Trials from which on shares say something."""
ENOUGH = 30
"""Trials from which on they are more than a hint."""
METHOD = "the share of the ranking that each key explains by itself"
_GROUPS = 4


@dataclass(frozen=True)
class Importance:
    """Shares of the keys, the greatest first, and how they were found; or why nothing can be said."""

    shares: Mapping[str, float]
    method: str
    trials: int
    missing: str = ""


def importance_of(record: SearchRecord) -> Importance:
    """By all trials that have been evaluated: of those that were stopped, how far they came counts as well."""
    trials = record.ranked
    keys = [key for key in record.keys if len({repr(trial.params.get(key)) for trial in trials}) > 1]
    if len(trials) < FEWEST:
        return Importance({}, "", len(trials), f"too few trials to tell: {len(trials)} of at least {FEWEST}")
    if not keys:
        return Importance({}, "", len(trials), "the trials do not differ in any key")
    # By its place among all: a single trial that has diverged must not decide.
    ranks = [float(place) for place in range(len(trials))]
    found = {key: explained([trial.params.get(key) for trial in trials], ranks) for key in keys}
    whole = sum(found.values())
    if not whole:
        return Importance({}, METHOD, len(trials), "no key explains which trials are better")
    shares = {key: found[key] / whole for key in sorted(keys, key=lambda key: -found[key])}
    return Importance(shares, METHOD if len(trials) >= ENOUGH else f"{METHOD}; so few are a hint only", len(trials))


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
