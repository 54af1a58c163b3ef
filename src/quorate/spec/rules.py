"""What must hold between keys, each rule as the equation that does not hold, both numbers and where they were said."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from quorate.core.addresses import has_secret, shown_place
from quorate.core.errors import Problem

OWN_PLACE = "checkpoints"
"""How `checkpoint.to` names the folder of that name in the run folder."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.+")

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


_LANE_EACH = frozenset({"ring"})
"""Kinds of strategy in which each worker hosts a lane at least, and no lane is hosted twice."""


def _workers_fit_lanes(job: Mapping[str, Any], told: Told) -> Problem | None:
    workers, lanes, strategy = job["workers"], job["lanes"], job["strategy"]
    kind = strategy if isinstance(strategy, str) else dict(strategy).get("kind")
    if workers == "auto" or workers <= lanes or kind not in _LANE_EACH:
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


def _own_place_comes_first(job: Mapping[str, Any], told: Told) -> Problem | None:
    places = _places(job)
    if places[:1] == [OWN_PLACE]:
        return None
    first = f"it begins with {_shown(places[0])}" if places else "it names no place"
    return Problem(
        "checkpoint.to",
        f"{first}{told('checkpoint.to')}: a checkpoint is saved in the run's own folder, {OWN_PLACE}, before it is "
        "copied anywhere",
        f"Write {OWN_PLACE} first, and after it the places that get copies: [{OWN_PLACE}, s3://bucket/prefix].",
    )


def _places_can_be_reached(job: Mapping[str, Any], told: Told) -> Problem | None:
    for place in [other for other in _places(job)[1:] if other != OWN_PLACE]:
        if has_secret(place):
            return Problem(
                "checkpoint.to",
                f"{_shown(place)}{told('checkpoint.to')} has a password or a query in it, and the job is written down "
                "in the run",
                "Leave it out, and give it to the store's own library, in the environment or in its settings file.",
            )
        if not _URL.fullmatch(place) and not PurePath(place).is_absolute():
            return Problem(
                "checkpoint.to",
                f"{_shown(place)}{told('checkpoint.to')} is neither the absolute path of a folder nor a URL",
                f"After {OWN_PLACE}, write places such as /mnt/backup or s3://bucket/prefix.",
            )
    return None


def _places_differ(job: Mapping[str, Any], told: Told) -> Problem | None:
    places = [place.rstrip("/") for place in _places(job)]
    twice = [place for index, place in enumerate(places) if place in places[:index]]
    if not twice:
        return None
    return Problem(
        "checkpoint.to", f"{_shown(twice[0])}{told('checkpoint.to')} stands there twice", "Name every place once."
    )


def _one_key(job: Mapping[str, Any], told: Told) -> Problem | None:
    encrypt = dict(job["checkpoint"]).get("encrypt")
    if encrypt is None:
        return None
    given = [key for key in ("key_file", "key_env") if dict(encrypt).get(key) is not None]
    if len(given) == 1:
        return None
    said = "both key_file and key_env are given" if given else "neither key_file nor key_env is given"
    return Problem(
        "checkpoint.encrypt",
        f"{said}{told('checkpoint.encrypt')}",
        "Give exactly one: key_file: /path/of/key (a file), or key_env: MY_KEY (an environment variable).",
    )


def _places(job: Mapping[str, Any]) -> list[str]:
    return list(dict(job["checkpoint"]).get("to", [OWN_PLACE]))


def _shown(place: str) -> str:
    # What a person has typed in the wrong place must not stand in a log.
    return f'"{shown_place(place)}"'


RULES = (
    Rule(frozenset({"workers", "lanes", "strategy"}), _workers_fit_lanes),
    Rule(frozenset({"min_workers", "workers", "lanes"}), _fewest_workers_fit),
    Rule(frozenset({"batch_size", "lanes", "accumulate"}), _batch_feeds_lanes),
    Rule(frozenset({"epochs", "steps"}), _one_length),
    Rule(frozenset({"early_stop", "evaluate"}), _early_stop_sees_evaluations),
    Rule(frozenset({"checkpoint"}), _own_place_comes_first),
    Rule(frozenset({"checkpoint"}), _places_can_be_reached),
    Rule(frozenset({"checkpoint"}), _places_differ),
    Rule(frozenset({"checkpoint"}), _one_key),
)


def broken_rules(job: Mapping[str, Any], doubtful: Collection[str] = (), told: Told = untold) -> list[Problem]:
    """The rules that do not hold, leaving out those about keys that are wrong already."""
    broken = []
    for rule in RULES:
        problem = rule.judge(job, told) if rule.keys.isdisjoint(doubtful) else None
        if problem is not None:
            broken.append(replace(problem, keys=tuple(sorted(rule.keys - {problem.path}))))
    return broken
