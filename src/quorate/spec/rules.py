"""What must hold between keys, each rule as the equation that does not hold, both numbers and where they were said."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quorate.core.errors import Problem

Told = Callable[[str], str]
"""Where the value of a key was said, to stand behind it: " (--workers)"; nothing where that is not known."""

Judge = Callable[[Mapping[str, Any], Told], Problem | None]


@dataclass(frozen=True)
class Rule:
    """A relation between keys; it can be judged only when all of them are valid by themselves."""

    keys: frozenset[str]
    judge: Judge


def untold(key: str) -> str:  # noqa: ARG001 (a Told)
    """For values that came from no file, variable or flag."""
    return ""


def _workers_fit_lanes(job: Mapping[str, Any], told: Told) -> Problem | None:
    workers, lanes = job["workers"], job["lanes"]
    if workers == "auto" or workers <= lanes:
        return None
    return Problem(
        "workers",
        f"{workers} workers{told('workers')} cannot share {lanes} lanes{told('lanes')}: each worker hosts at least one "
        f"lane, and {workers} > {lanes}",
        f"Use at most {lanes} workers, or raise lanes (which changes what the job computes).",
    )


def _fewest_workers_fit(job: Mapping[str, Any], told: Told) -> Problem | None:
    least = job["min_workers"]
    most_key = "lanes" if job["workers"] == "auto" else "workers"
    most = job[most_key]
    if least <= most:
        return None
    return Problem(
        "min_workers",
        f"the job would never begin: it waits for {least} workers{told('min_workers')} and can have "
        f"{most} ({most_key}{told(most_key)}), and {least} > {most}",
        f"Use a min_workers of at most {most}.",
    )


def _batch_feeds_lanes(job: Mapping[str, Any], told: Told) -> Problem | None:
    batch_size, lanes, accumulate = job["batch_size"], job["lanes"], job["accumulate"]
    least = lanes * accumulate
    if batch_size >= least:
        return None
    parts = f" × accumulate {accumulate}{told('accumulate')}" if accumulate > 1 else ""
    return Problem(
        "batch_size",
        f"a batch of {batch_size}{told('batch_size')} cannot be shared by {lanes} lanes{told('lanes')}{parts}: each "
        f"gets at least one sample, and {batch_size} < {least}",
        f"Use a batch_size of at least {least}, or fewer lanes (which changes what the job computes).",
    )


def _one_length(job: Mapping[str, Any], told: Told) -> Problem | None:
    epochs, steps = job["epochs"], job["steps"]
    if epochs is None and steps is None:
        return Problem(
            "epochs", "neither epochs nor steps is given", "Say how long to train: epochs: 3 or steps: 1000."
        )
    if epochs is not None and steps is not None:
        both = f"both epochs: {epochs}{told('epochs')} and steps: {steps}{told('steps')} are given"
        return Problem("epochs", both, "Keep exactly one of them.")
    return None


def _early_stop_sees_evaluations(job: Mapping[str, Any], told: Told) -> Problem | None:
    if job["early_stop"] is None or dict(job["evaluate"] or {}).get("every") != "end":
        return None
    return Problem(
        "early_stop",
        f"it watches the evaluations during training, and with evaluate.every: end{told('evaluate.every')} there are "
        "none",
        "Use evaluate.every: epoch or a number of steps, or leave early_stop out.",
    )


RULES = (
    Rule(frozenset({"workers", "lanes"}), _workers_fit_lanes),
    Rule(frozenset({"min_workers", "workers", "lanes"}), _fewest_workers_fit),
    Rule(frozenset({"batch_size", "lanes", "accumulate"}), _batch_feeds_lanes),
    Rule(frozenset({"epochs", "steps"}), _one_length),
    Rule(frozenset({"early_stop", "evaluate"}), _early_stop_sees_evaluations),
)


def broken_rules(job: Mapping[str, Any], doubtful: Collection[str] = (), told: Told = untold) -> list[Problem]:
    """The rules that do not hold, leaving out those about keys that are wrong already."""
    broken = []
    for rule in RULES:
        problem = rule.judge(job, told) if rule.keys.isdisjoint(doubtful) else None
        if problem is not None:
            broken.append(replace(problem, keys=tuple(sorted(rule.keys - {problem.path}))))
    return broken
