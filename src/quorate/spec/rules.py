"""What must hold between keys, each rule as the equation that does not hold and both numbers."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from quorate.core.errors import Problem


@dataclass(frozen=True)
class Rule:
    """A relation between keys; it can be judged only when all of them are valid by themselves."""

    keys: frozenset[str]
    judge: Callable[[Mapping[str, Any]], Problem | None]


def _workers_fit_lanes(job: Mapping[str, Any]) -> Problem | None:
    workers, lanes = job["workers"], job["lanes"]
    if workers == "auto" or workers <= lanes:
        return None
    return Problem(
        "workers",
        f"{workers} workers cannot share {lanes} lanes: each worker hosts at least one lane, and {workers} > {lanes}",
        f"Use at most {lanes} workers, or raise lanes (which changes what the job computes).",
    )


def _batch_feeds_lanes(job: Mapping[str, Any]) -> Problem | None:
    batch_size, lanes, accumulate = job["batch_size"], job["lanes"], job["accumulate"]
    least = lanes * accumulate
    if batch_size >= least:
        return None
    return Problem(
        "batch_size",
        f"{batch_size} samples cannot be shared by {lanes} lanes × accumulate {accumulate}: {batch_size} < {least}",
        f"Use a batch_size of at least {least}, or fewer lanes.",
    )


def _one_length(job: Mapping[str, Any]) -> Problem | None:
    epochs, steps = job["epochs"], job["steps"]
    if epochs is None and steps is None:
        return Problem(
            "epochs", "neither epochs nor steps is given", "Say how long to train: epochs: 3 or steps: 1000."
        )
    if epochs is not None and steps is not None:
        return Problem("epochs", f"both epochs ({epochs}) and steps ({steps}) are given", "Keep exactly one of them.")
    return None


RULES = (
    Rule(frozenset({"workers", "lanes"}), _workers_fit_lanes),
    Rule(frozenset({"batch_size", "lanes", "accumulate"}), _batch_feeds_lanes),
    Rule(frozenset({"epochs", "steps"}), _one_length),
)


def broken_rules(job: Mapping[str, Any], doubtful: Collection[str] = ()) -> list[Problem]:
    """The rules that do not hold, leaving out those about keys that are wrong already."""
    judged = (rule.judge(job) for rule in RULES if rule.keys.isdisjoint(doubtful))
    return [problem for problem in judged if problem is not None]
