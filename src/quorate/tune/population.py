"""Population-based training: who goes on from whose checkpoint, and with which params.

All trials train up to the same step and wait there. Then the worst go on as branches of the best. Who that is, and what
is changed, follows from the evaluations and the seed alone.
"""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quorate.checkpoint.retention import is_number
from quorate.core.digests import derive_seed
from quorate.observe.quantities import measure
from quorate.spec.search import PbtSpec, SearchSpec
from quorate.spec.space import DimensionSpec

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
        return within(dimension, value * factor)
    place = choices.index(value) if value in choices else 0
    return choices[min(len(choices) - 1, max(0, place + (1 if factor > 1 else -1)))]


def within(dimension: DimensionSpec, value: float) -> float:
    """A number of the range, as short as the search writes those that it draws."""
    return min(dimension.high, max(dimension.low, float(f"{value:.6g}")))
